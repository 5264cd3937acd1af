//! What Prometheus is told.

use std::net::TcpStream;

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::{Node, Setup, isolated};

const ADDRESS: &str = "127.0.0.1:9477";
const LISTENS: &str = "metrics = \"127.0.0.1:9477\"";

fn scraped(node: &Node) -> Result<String> {
    node.host
        .run("curl --silent --show-error --fail http://127.0.0.1:9477/metrics")
}

/// The value of a series, as it is written.
fn value(text: &str, series: &str) -> Result<f64> {
    let line = { text.lines() }.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    let value = line.with_context(|| format!("{series}: {text}"))?;
    value.parse().with_context(|| value.to_owned())
}

#[test]
fn a_scrape_tells_of_paths_and_connections() {
    isolated(|| {
        Setup::new().key(LISTENS).run(|net| {
            let talk = net.bumped()?;
            let text = scraped(&net.a)?;
            let of = |name: &str, path: &str| {
                value(&text, &format!("{name}{{path=\"{path}\",peer=\"server\"}}"))
            };
            for path in ["eth", "wlan"] {
                ensure!(of("dibs_path_up", path)? == 1.0, "{text}");
                ensure!(of("dibs_path_sent_bytes_total", path)? > 0.0, "{text}");
                let rtt = of("dibs_path_rtt_seconds", path)?;
                ensure!(rtt > 0.0 && rtt < 60.0, "{text}");
            }
            ensure!(value(&text, "dibs_peer_session_up{peer=\"server\"}")? == 1.0);
            let on = "dibs_bump_connections{bump=\"scramble\"}";
            ensure!(value(&text, on)? == 1.0, "{text}");
            // A counter never goes back.
            talk.advance(256 << 10)?;
            let sent = "dibs_path_sent_bytes_total{path=\"eth\",peer=\"server\"}";
            let before = value(&text, sent)?;
            let mut then = before;
            // Scrapes of one second are told the same.
            wait("a scrape that is told anew", || {
                let count = scraped(&net.a).and_then(|text| value(&text, sent));
                then = count.unwrap_or(before);
                then != before
            })?;
            ensure!(then > before, "{before}, then {then}");
            // Elsewhere there is nothing, and for other hosts nobody.
            let elsewhere = "curl --silent --output /dev/null --write-out '%{http_code}' \
                             http://127.0.0.1:9477/";
            ensure!(net.a.host.shell(elsewhere)?.trim() == "404");
            let other = net.b.host.run("curl --silent http://10.0.1.1:9477/metrics");
            ensure!(other.is_err(), "{other:?}");
            // Who says nothing keeps nobody out.
            let silent = net.a.host.in_ns(|| -> std::io::Result<Vec<TcpStream>> {
                (0..20).map(|_| TcpStream::connect(ADDRESS)).collect()
            })?;
            ensure!(scraped(&net.a)?.ends_with("# EOF\n"));
            drop(silent);
            talk.finish()?;
            // What has ended is counted no more, though the data path knows of it for a while.
            for of_live in [on, "dibs_peer_connections{peer=\"server\"}"] {
                wait(of_live, || {
                    let text = scraped(&net.a).unwrap_or_default();
                    value(&text, of_live).is_ok_and(|count| count == 0.0)
                })?;
            }
            Ok(())
        })
    });
}

/// Steering does not depend on who looks on.
#[test]
fn a_port_of_others_does_not_keep_the_daemon_from_running() {
    isolated(|| {
        Setup::new().key(LISTENS).without_daemons().run(|net| {
            let mut command = net.a.host.command("socat");
            command.args(["TCP-LISTEN:9477,bind=127.0.0.1,fork", "/dev/null"]);
            let taken = net.a.host.spawn(command)?;
            wait("the port to be taken", || {
                net.a.host.is_listening(9477).unwrap_or(false)
            })?;
            net.start()?;
            let log = net.a.log();
            ensure!(
                log.contains("metrics: cannot listen at 127.0.0.1:9477"),
                "{log}"
            );
            taken.kill();
            Ok(())
        })
    });
}
