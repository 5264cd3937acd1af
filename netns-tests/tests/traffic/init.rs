//! Two hosts that were set up by `dibsctl init` alone.

use anyhow::{Context as _, Result, ensure};
use netns_tests::traffic::{SETTLED, Talk};
use netns_tests::{Node, Setup, isolated};

const FILE: &str = "/run/dibs/dibsd.toml";

/// Runs `init` on a host, and returns the line that it prints.
fn init(node: &Node, wishes: &[&str]) -> Result<String> {
    let answer = node.ctl(&[&["init", "--config", FILE], wishes].concat())?;
    let warnings = &answer["warnings"];
    ensure!(warnings.as_array().is_some_and(Vec::is_empty), "{warnings}");
    let line = answer["line"].as_str().context("no line")?;
    Ok(line.to_owned())
}

#[test]
fn hosts_that_exchanged_a_line_each_carry_connections() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            for node in [&net.a, &net.b] {
                for file in ["dibsd.toml", "private.key"] {
                    std::fs::remove_file(node.directory().join(file))?;
                }
            }
            // The user says once what he trusts, and pastes a line on each host.
            let of_a = init(&net.a, &["--trusted", "eth0"])?;
            let of_b = init(&net.b, &["--peer", &of_a])?;
            init(&net.a, &["--peer", &of_b])?;
            net.start()?;

            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "seal")?;
            talk.advance(SETTLED)?;
            let ears = net.eavesdrop()?;
            talk.advance(2 << 20)?;
            ears.heard_nothing(&talk.plaintexts, 2 << 20)?;
            // Connections to the far end's other address may take a bump, too.
            let by_wlan = "10.0.2.2:7001".parse().context("an address")?;
            let other = Talk::start(&net.a.host, &net.b.host, by_wlan)?;
            net.a.enable(7001)?;
            net.wait_bump(7001, "seal")?;
            other.advance(64 << 10)?;
            other.finish()?;
            talk.finish()
        })
    });
}
