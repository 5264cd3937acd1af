//! Two hosts that were set up by `dibsctl init` alone.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use netns_tests::household::Households;
use netns_tests::traffic::{SETTLED, Talk};
use netns_tests::{Node, Setup, isolated};
use nix::sys::signal::Signal;

/// Removes what `init` is to make.
fn clear(node: &Node) -> Result<()> {
    for file in ["dibsd.toml", "private.key"] {
        std::fs::remove_file(node.directory().join(file))?;
    }
    Ok(())
}

#[test]
fn hosts_that_exchanged_a_line_each_carry_connections() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            [&net.a, &net.b].into_iter().try_for_each(clear)?;
            // The user says once what he trusts, and pastes a line on each host.
            let of_a = net.a.init(&["--trusted", "eth0"])?;
            let of_b = net.b.init(&["--peer", &of_a])?;
            net.a.init(&["--peer", &of_b])?;
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

/// As docs/nat.md says it: the laptop has two uplinks, each behind a router that translates, and the server a public address.
#[test]
fn a_laptop_behind_two_routers_and_a_server_need_a_line_each() {
    isolated(|| {
        Households::run(1, |net| {
            let (a, b) = (&mut net.homes[0].node, &mut net.b);
            for node in [&mut *a, &mut *b] {
                node.stop(Signal::SIGTERM)?;
                clear(node)?;
            }
            // With an address of the Internet it would not be behind NAT.
            a.host.run("ip address del 2001:db8:1::2/64 dev dsl")?;
            let of_b = b.init(&[])?;
            let of_a = a.init(&["--peer", &of_b])?;
            b.init(&["--peer", &of_a])?;
            b.start()?;
            a.start()?;
            a.wait_until_joined(2)?;
            let paths = a.ctl(&["path", "list"])?;
            for name in ["dsl", "lte"] {
                ensure!(a.path(name)?["trust"] == "untrusted", "{paths:#}");
            }
            let to = |port| SocketAddr::from(([203, 0, 113, 7], port));
            let live = Talk::start(&a.host, &b.host, to(7000))?;
            live.advance(SETTLED)?;
            for (node, end) in [(&*a, "--dport"), (&*b, "--sport")] {
                for bump in ["seal", "plain"] {
                    node.put_on(bump, end, 7000)?;
                    live.advance(SETTLED)?;
                }
            }
            a.ctl(&["rule", "add", "--dport", "7001", "--bump", "seal"])?;
            let new = Talk::start(&a.host, &b.host, to(7001))?;
            let before = ["dsl", "lte"].map(|path| a.path(path));
            new.advance(8 * SETTLED)?;
            a.wait_bump(7001, "seal")?;
            for (name, before) in ["dsl", "lte"].into_iter().zip(before) {
                let sent = |path: &serde_json::Value| path["bytes_sent"].as_u64();
                ensure!(
                    sent(&a.path(name)?) > sent(&before?),
                    "{name} carries nothing"
                );
            }
            live.finish()?;
            new.finish()
        })
    });
}
