// What a reader would see wrong on a page: a list of sentences. The page's own script defines `plots` and `css`.
() => {
  const faults = [];
  const named = (element) => `${element.tagName.toLowerCase()}.${element.className || "-"} in ${element.closest("section")?.id ?? "the top"}`;
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) faults.push(`the page is ${root.scrollWidth} px wide in a window of ${innerWidth}`);

  // Text outside its box. A box that scrolls shows it all, and one with an ellipsis says that it shows less.
  const isOutside = (text, box) => text.left < box.left - 1 || text.right > box.right + 1 || text.top < box.top - 3 || text.bottom > box.bottom + 3;
  const checkBoxes = (node, rects) => {
    for (let box = node.parentElement; box && box !== document.body; box = box.parentElement) {
      const style = getComputedStyle(box);
      if (style.display === "inline" || style.display === "contents") continue;
      const scrolls = /auto|scroll/.test(style.overflowX + style.overflowY);
      if (scrolls || style.textOverflow === "ellipsis") return;
      const bounds = box.getBoundingClientRect();
      const wrong = rects.find((rect) => isOutside(rect, bounds));
      if (wrong) return faults.push(`"${node.data.trim().slice(0, 40)}" is outside of ${named(box)}`);
    }
  };

  // Text that cannot be read on its background: below the contrast that WCAG 2 wants of text.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = new Map();
  const rgba = (colour) => {
    if (!channels.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      channels.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return channels.get(colour);
  };
  const light = (colour) => {
    const [red, green, blue] = rgba(colour).slice(0, 3).map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const checkContrast = (node) => {
    let box = node.parentElement;
    const style = getComputedStyle(box);
    while (box && rgba(getComputedStyle(box).backgroundColor)[3] < 255) box = box.parentElement;
    const [low, high] = [light(style.color), light(getComputedStyle(box ?? root).backgroundColor)].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) faults.push(`"${node.data.trim().slice(0, 40)}" has a contrast of ${contrast.toFixed(1)} in ${named(node.parentElement)}`);
  };

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.data.trim() || node.parentElement.closest("script, option, noscript")) continue;
    range.selectNodeContents(node);
    const rects = [...range.getClientRects()].filter((rect) => rect.width && rect.height);
    if (!rects.length) continue;
    checkBoxes(node, rects);
    checkContrast(node);
  }

  // A chart in which nothing but the grid is drawn. A copy is read: browsers warn of canvases that are read themselves.
  const pixelsOf = (drawn, left, top, width, height) => {
    const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(drawn, -left, -top);
    return copy.getImageData(0, 0, width, height).data;
  };
  const grid = rgba(css("--line"));
  for (const chart of document.querySelectorAll(".chart")) {
    const plot = [...plots].find((one) => chart.contains(one.root));
    const { left, top, width, height } = plot?.bbox ?? { width: 0, height: 0 };
    const data = width && height ? pixelsOf(plot.ctx.canvas, left, top, width, height) : [];
    let drawn = 0;
    for (let at = 0; at < data.length && drawn < 20; at += 4) {
      const differs = [0, 1, 2].some((i) => Math.abs(data[at + i] - grid[i]) > 30);
      if (data[at + 3] > 60 && differs) drawn += 1;
    }
    if (drawn < 20) faults.push(`nothing is drawn in the chart ${chart.getAttribute("aria-label")}`);
  }
  return faults;
}
