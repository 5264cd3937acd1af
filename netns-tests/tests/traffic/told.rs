//! What stands in the way without any fault of the daemons is said, with what to do.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::traffic::{Talk, connect};
use netns_tests::{Node, Setup, isolated};
use serde_json::Value;

fn warnings(answer: &Value) -> Result<Vec<String>> {
    let warnings = answer["warnings"].as_array().context("no warnings")?;
    let text = |warning: &Value| warning.as_str().map(str::to_owned);
    warnings
        .iter()
        .map(text)
        .collect::<Option<_>>()
        .context("no text")
}

/// The host's firewall takes nothing that comes out of a TUN, so no kernel answers.
#[test]
fn a_firewall_that_drops_what_comes_by_the_tun() {
    isolated(|| {
        Setup::new().run(|net| {
            let drops = "INPUT -i dibs1 -j DROP";
            for which in ["a", "b"] {
                // It is on its way at any moment: what is asked is whether it is acknowledged.
                let (a, b) = (&net.a.host, &net.b.host);
                let ends = connect(a, b, server(7000))?;
                let pauses = [Duration::ZERO, Duration::from_millis(32)];
                let talk = Talk::in_bursts(pauses.map(Some), a, b, ends)?;
                let host = if which == "a" {
                    &net.a.host
                } else {
                    &net.b.host
                };
                host.shell(&format!("iptables -I {drops}"))?;
                let enabled = net.a.ctl(&["enable", "--dport", "7000"])?;
                let said = warnings(&enabled)?;
                let tells =
                    |said: &&String| said.contains("acknowledgement") && said.contains("dibs1");
                ensure!(said.iter().any(|said| tells(&said)), "{which}: {said:?}");
                host.shell(&format!("iptables -D {drops}"))?;
                talk.advance(64 << 10)?;
                net.a.disable(7000)?;
                talk.advance(64 << 10)?;
                let enabled = net.a.ctl(&["enable", "--dport", "7000"])?;
                let said = warnings(&enabled)?;
                ensure!(!said.iter().any(|said| tells(&said)), "{which}: {said:?}");
                net.a.disable(7000)?;
                talk.finish()?;
            }
            Ok(())
        })
    });
}

fn is_told(node: &Node, words: [&str; 3]) -> Result<bool> {
    let said = warnings(&node.ctl(&["status"])?)?;
    Ok(said
        .iter()
        .any(|said| words.iter().all(|word| said.contains(word))))
}

#[test]
fn a_peer_with_addresses_of_this_host() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let file = net.a.directory().join("dibsd.toml");
            let config = std::fs::read_to_string(&file)?;
            let swapped = config
                .replacen("\"10.0.1.2/32\"", "\"10.0.1.2/32\", \"10.0.9.9/32\"", 1)
                .replacen("wlan = \"10.0.2.2:5300\"", "wlan = \"10.0.2.1:5300\"", 1);
            ensure!(swapped.matches("10.0.9.9/32").count() == 1, "{config}");
            ensure!(swapped.matches("10.0.2.1:5300").count() == 1, "{config}");
            std::fs::write(&file, swapped)?;
            net.a.start()?;
            net.b.start()?;
            ensure!(is_told(&net.a, ["server", "10.0.2.1:5300", "endpoint"])?);
            ensure!(net.a.log().contains("10.0.2.1:5300, its endpoint"));
            // It comes later.
            let late = ["server", "10.0.9.9", "behind the peer"];
            ensure!(!is_told(&net.a, late)?);
            net.a.host.run("ip address add 10.0.9.9/32 dev eth0")?;
            wait("the address to be told of", || {
                is_told(&net.a, late).unwrap_or(false)
            })?;
            net.a.host.run("ip address del 10.0.9.9/32 dev eth0")?;
            wait("it to be forgotten", || {
                !is_told(&net.a, late).unwrap_or(true)
            })?;
            let told = net.a.log().matches("10.0.9.9").count();
            ensure!(told == 1, "told {told} times");
            ensure!(!is_told(&net.b, ["address of this host", "", ""])?);
            Ok(())
        })
    });
}
