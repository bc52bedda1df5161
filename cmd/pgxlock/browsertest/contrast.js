// Lists the texts whose contrast is below 4.5 to 1, as WCAG 2.2 computes it (1.4.3, level AA).
(() => {
  const channels = (color) => {
    const [r, g, b, a = 1] = color.match(/[\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const luminance = (color) => {
    const [r, g, b] = color.slice(0, 3).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    const layers = [];
    for (; element; element = element.parentElement) {
      const box = element.tagName === "g" ? element.querySelector("rect") : null;
      if (box) layers.push(channels(getComputedStyle(box).fill));
      layers.push(channels(getComputedStyle(element).backgroundColor));
    }
    return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const opacity = (element) => (element ? getComputedStyle(element).opacity * opacity(element.parentElement) : 1);
  const found = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const text = texts.currentNode.data.trim();
    if (!text || !element.getClientRects().length || element.tagName === "title") continue;
    const style = getComputedStyle(element);
    const below = background(element);
    const color = channels(element instanceof SVGElement ? style.fill : style.color);
    color[3] *= opacity(element);
    const [dark, light] = [luminance(over(color, below)), luminance(below)].sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) found.add(`${ratio.toFixed(1)} ${element.tagName} ${element.getAttribute("class") ?? ""}: ${text.slice(0, 30)}`);
  }
  return [...found];
})()
