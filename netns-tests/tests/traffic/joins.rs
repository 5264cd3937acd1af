//! How paths open: the question for one is brought to another, or names an address that its host does not
//! know, or not yet.

use std::net::SocketAddrV4;

use anyhow::{Context as _, Result, ensure};
use dibs_lab::Capture;
use netns_tests::attacker::{Attacker, datagrams};
use netns_tests::daemon::{Node, wait};
use netns_tests::traffic::SETTLED;
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;

/// Changes what the next daemon is told.
fn edit(node: &Node, change: impl FnOnce(String) -> String) -> Result<()> {
    let config = std::fs::read_to_string(node.directory().join("dibsd.toml"))?;
    node.configure(&change(config))
}

/// `b` waits to be called, from wherever it may be.
fn without_endpoints(b: &Node) -> Result<()> {
    edit(b, |config| {
        config.replace("[peer.endpoints]\neth = \"10.0.1.1:5300\"\n", "")
    })
}

fn address(text: &str) -> Result<SocketAddrV4> {
    text.parse().with_context(|| text.to_owned())
}

fn start(net: &mut Net) -> Result<()> {
    net.b.start()?;
    net.a.start()
}

#[test]
fn a_question_brought_to_the_trusted_path_is_dropped() {
    isolated(|| {
        let setup = Setup::new().attacked("eth0").without_daemons();
        setup.run(|net| {
            without_endpoints(&net.b)?;
            edit(&net.a, |config| config.replace("untrusted", "trusted"))?;
            let swallow = "PREROUTING -i wlan0 -s 10.0.2.1 -j DROP";
            net.b.host.run(&format!("iptables -t raw -I {swallow}"))?;
            let ears = Capture::start(&net.b.host, "wlan0")?;
            start(net)?;
            for node in [&net.a, &net.b] {
                node.wait_path("eth", "up")?;
            }
            // Both paths were asked for at once.
            let heard = datagrams(&ears.finish()?, address("10.0.2.2:5300")?);
            let asked: Vec<_> = heard.iter().filter(|d| matches!(d[0], 4 | 5)).collect();
            ensure!(!asked.is_empty(), "no question was heard");

            let middle = net.attacker.as_ref().context("a host in the link")?;
            let (sender, back) = (Attacker::on(middle)?, Capture::start(middle, "mitm0")?);
            let (elsewhere, a) = (address("10.0.1.77:4444")?, address("10.0.1.1:5300")?);
            for (question, from) in asked.iter().zip([elsewhere, a].into_iter().cycle()) {
                sender.send(from, address("10.0.1.2:5300")?, question)?;
            }
            wait("the questions to be dropped", || {
                let dropped = net.b.counter("path_misdirected");
                dropped.is_ok_and(|n| n == asked.len() as u64)
            })?;
            let answers = datagrams(&back.finish()?, elsewhere);
            ensure!(answers.is_empty(), "{} answers", answers.len());

            net.b.host.run(&format!("iptables -t raw -D {swallow}"))?;
            net.wait_established()?;
            let trust = net.a.path("wlan")?["trust"].clone();
            ensure!(trust == "untrusted", "{trust}");
            Ok(())
        })
    });
}

#[test]
fn a_trusted_path_opens_by_an_address_that_came_later() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            without_endpoints(&net.b)?;
            net.b.host.run("ip address del 10.0.1.2/24 dev eth0")?;
            start(net)?;
            net.b.host.run("ip address add 10.0.1.2/24 dev eth0")?;
            net.wait_established()?;
            // And goes on by another one.
            let moved = |config: String| config.replace("10.0.1.2:5300", "10.0.1.22:5300");
            edit(&net.a, moved)?;
            net.a.stop(Signal::SIGTERM)?;
            net.b.host.run("ip address add 10.0.1.22/24 dev eth0")?;
            net.a.start()?;
            net.wait_established()?;
            ensure!(net.a.path("eth")?["remote"] == "10.0.1.22:5300");
            Ok(())
        })
    });
}

/// A home router gets another port, and another address, in the midst of a stream on scramble: the far end says at once
/// that it sees the host elsewhere, and the host asks for the path anew.
#[test]
fn a_trusted_path_is_asked_for_anew_from_where_the_host_is_seen() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            without_endpoints(&net.b)?;
            start(net)?;
            net.wait_established()?;
            let talk = net.bumped()?;
            net.a.host.run("ip address add 10.0.1.77/24 dev eth0")?;
            // As with a router: nothing gets in but by the translation.
            let drop = "PREROUTING -i eth0 -p udp --dport 5300 -j DROP";
            net.a.host.run(&format!("iptables -t raw -I {drop}"))?;
            for (n, place) in [(1, "10.0.1.1:7001"), (2, "10.0.1.77:7002")] {
                let rule = "POSTROUTING -o eth0 -p udp --dport 5300 -j SNAT --to-source";
                net.a
                    .host
                    .run(&format!("iptables -t nat -I {rule} {place}"))?;
                net.a.host.run("conntrack -D -p udp")?;
                talk.advance(SETTLED)?;
                wait("the path to lead to the new place", || {
                    let path = net.b.path("eth");
                    path.is_ok_and(|path| path["remote"] == place && path["state"] == "up")
                })?;
                ensure!(
                    net.b.counter("endpoint_challenged")? >= n,
                    "it was not told"
                );
                ensure!(net.b.counter("endpoint_moved")? == 0, "it roamed");
                ensure!(net.a.path("eth")?["trust"] == "trusted");
            }
            talk.finish()
        })
    });
}

#[test]
fn where_addresses_are_translated_a_trusted_path_needs_the_endpoint_or_that_address() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            edit(&net.a, |config| config.replace("10.0.1.2:", "10.0.1.99:"))?;
            let to = "-d 10.0.1.99 -j DNAT --to-destination 10.0.1.2";
            net.a
                .host
                .run(&format!("iptables -t nat -A OUTPUT -p udp {to}"))?;
            let file = net.b.directory().join("dibsd.toml");
            let with_endpoints = std::fs::read_to_string(file)?;
            without_endpoints(&net.b)?;
            start(net)?;
            wait("questions to be dropped", || {
                let dropped = net.b.counter("path_misdirected");
                dropped.is_ok_and(|n| n >= 3)
            })?;
            net.b.wait_path("wlan", "up")?;
            let paths = net.b.ctl(&["path", "list"])?;
            let names: Vec<_> = paths
                .as_array()
                .into_iter()
                .flatten()
                .map(|path| &path["name"])
                .collect();
            ensure!(names == ["wlan"], "{paths:#}");
            let words = "trusted path eth does not open: the peer asks for it at 10.0.1.99, no address of it";
            ensure!(net.b.log().matches(words).count() == 1, "{}", net.b.log());
            let diagnosis = net.b.diagnosis("session")?;
            ensure!(diagnosis.contains(words), "{diagnosis}");
            let without = std::fs::read_to_string(net.b.directory().join("dibsd.toml"))?;
            let named = "name = \"eth\"\n";
            let public = without.replacen(named, &format!("{named}public = [\"10.0.1.99\"]\n"), 1);
            for config in [with_endpoints, public] {
                net.b.stop(Signal::SIGTERM)?;
                net.b.configure(&config)?;
                net.b.start()?;
                net.wait_established()?;
                let trust = net.a.path("eth")?["trust"].clone();
                ensure!(trust == "trusted", "{trust}");
                let peers = net.b.ctl(&["peer", "list"])?;
                ensure!(peers[0]["reason"].is_null(), "{peers:#}");
            }
            Ok(())
        })
    });
}
