// Reads out the points of a line chart under the pointer or finger. Without it the page lacks nothing else.
"use strict";
for (const drawing of document.querySelectorAll("svg[data-readout]")) {
  const lines = JSON.parse(drawing.dataset.readout);
  const output = drawing.closest(".card").querySelector("output");
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.setAttribute("class", "rule");
  rule.setAttribute("y2", "100%");
  const nearest = (points, at) =>
    points.reduce((best, point) => (Math.abs(point[1] - at) < Math.abs(best[1] - at) ? point : best));
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const found = lines.map((line) => [line.name, nearest(line.points, (event.clientX - box.left) / box.width)]);
    const place = `${100 * found[0][1][1]}%`;
    rule.setAttribute("x1", place);
    rule.setAttribute("x2", place);
    drawing.append(rule);
    output.textContent = `step ${found[0][1][0]}: ` + found.map(([name, point]) => `${name} ${point[2]}`.trim()).join(", ");
  });
  drawing.addEventListener("pointerleave", () => {
    rule.remove();
    output.textContent = "";
  });
}
