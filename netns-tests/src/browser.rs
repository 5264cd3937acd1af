//! A browser without a screen, and a page for it.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::load::nginx;
use dibs_netns::{HANG, Host, Process, require_programs};

/// Objects of the page, and bytes of each.
const OBJECTS: usize = 50;
const SIZE: usize = 20_000;
/// Once all is there, the title says how many objects can be shown, and by which protocols they came.
const COUNT: &str = "<script>onload = () => {\n\
    const shown = [...document.images].filter(image => image.naturalWidth == 7).length;\n\
    const loaded = performance.getEntriesByType('resource').map(entry => entry.nextHopProtocol);\n\
    document.title = shown + ' objects by ' + [...new Set(loaded)];\n\
    }</script>";

/// Serves the page with TLS and HTTP/2, until this is dropped.
///
/// # Errors
/// If openssl or nginx fails.
pub fn serve(host: &Host) -> Result<Process> {
    host.run("mkdir /run/page")?;
    host.run("openssl req -x509 -newkey rsa:2048 -nodes -keyout /run/tls.key -out /run/tls.pem -subj /CN=web -days 2")?;
    let images = (1..=OBJECTS).map(|number| format!("<img src=/{number}>"));
    let page = images.collect::<String>() + COUNT;
    let image = "<svg xmlns='http://www.w3.org/2000/svg' width='7' height='7'/>";
    let image = format!("{image}<!--{}-->", "x".repeat(SIZE - image.len() - 7));
    for (name, content) in [("index.html", page), ("image", image)] {
        fs::write(host.run_dir().join("page").join(name), content).context(name)?;
    }
    let server = "listen 443 ssl http2; ssl_certificate /run/tls.pem; ssl_certificate_key /run/tls.key;\n\
        root /run/page; location = / { default_type text/html; try_files /index.html =404; }\n\
        location / { default_type image/svg+xml; try_files /image =404; }";
    nginx(host, 80, server)
}

/// Loads that page in a browser.
///
/// # Errors
/// If the browser is not there, fails, or lacks an object.
pub fn browse(from: &Host, address: &str) -> Result<()> {
    let browser = "chromium-headless-shell";
    require_programs(&[(browser, browser)])?;
    let mut command = from.command(browser);
    command.args([
        "--no-sandbox",
        "--no-proxy-server",
        "--ignore-certificate-errors",
        "--user-data-dir=/run/browser",
        "--dump-dom",
        &format!("https://{address}/"),
    ]);
    let shown = from.run_within(HANG, command)?.stdout;
    let shown = String::from_utf8_lossy(&shown);
    let title = format!("<title>{OBJECTS} objects by h2</title>");
    ensure!(shown.contains(&title), "not {title:?}: {shown}");
    Ok(())
}
