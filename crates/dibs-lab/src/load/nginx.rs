//! nginx as a server.

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{HANG, Host, Process, wait_until};

/// Starts nginx on a host, whose own `/run` it uses, to listen on a port; `server` says what it answers. It is gone
/// when dropped.
///
/// # Errors
/// If it is not installed, or does not take its configuration.
pub fn nginx(host: &Host, port: u16, server: &str) -> Result<Process> {
    let configuration = format!(
        "daemon off; master_process off; user root; worker_processes 1; pid /run/nginx.pid;\n\
         error_log /run/nginx.log; events {{ worker_connections 8192; }}\n\
         http {{ access_log off; keepalive_requests 1000000000;\n\
         client_body_temp_path /run/t1; proxy_temp_path /run/t2; fastcgi_temp_path /run/t3;\n\
         uwsgi_temp_path /run/t4; scgi_temp_path /run/t5;\n\
         server {{ listen {port} backlog=1024; {server} }} }}\n"
    );
    std::fs::write(host.run_dir().join("nginx.conf"), configuration).context("nginx.conf")?;
    let mut command = host.command("nginx");
    command.args(["-c", "/run/nginx.conf", "-e", "/run/nginx.log"]);
    let started = host.spawn(command);
    let mut started = started.context("nginx is of the Debian package nginx-light")?;
    wait_until(HANG, "nginx", || {
        host.is_listening(port).unwrap_or(false) || !started.is_running()
    })?;
    ensure!(started.is_running(), "nginx ended: {}", started.stderr());
    Ok(started)
}
