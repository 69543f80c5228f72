// Sets the chosen theme before the page is drawn. Not a module: modules run too late for that.
(() => {
  try {
    const theme = localStorage.getItem("theme");
    if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  } catch {
    // Without storage the theme of the system is used.
  }
})();
