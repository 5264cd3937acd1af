//! Explicit congestion notification on the paths' datagrams (RFC 3168).

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::{Net, Setup, isolated};

const RULE: &str = "bump = \"seal\"\ndport = 7000";

/// Has the network before `b`'s interface `eth0` do this with dibs' datagrams.
fn on_the_way(net: &Net, does: &str) -> Result<()> {
    net.b.host.shell(&format!(
        "nft add table netdev way; \
         nft add chain netdev way in '{{ type filter hook ingress device eth0 priority 0; }}'; \
         nft add rule netdev way in udp dport 5300 {does}"
    ))?;
    Ok(())
}

/// Datagrams of `a`'s that were marked on path `eth`.
fn marked(net: &Net) -> Result<u64> {
    let path = net.a.path("eth")?;
    path["marked"].as_u64().context("marked")
}

#[test]
fn routers_mark_what_they_would_drop_and_the_sender_hears_of_it() {
    isolated(|| Setup::new().rule(RULE).run(|net| are_heard(net, "ip")));
}

#[test]
fn marks_are_heard_over_ipv6() {
    isolated(|| {
        Setup::new()
            .rule(RULE)
            .ipv6()
            .run(|net| are_heard(net, "ip6"))
    });
}

/// `header` is what nftables calls the one that carries the mark.
fn are_heard(net: &Net, header: &str) -> Result<()> {
    let does = format!("{header} ecn ect0 numgen inc mod 4 0 {header} ecn set ce");
    on_the_way(net, &does)?;
    let talk = net.talk(7000)?;
    talk.advance(4 << 20)?;
    net.wait_bump(7000, "seal")?;
    wait("marks that the peer has told of", || {
        talk.advance(256 << 10).is_ok() && marked(net).is_ok_and(|marked| marked > 0)
    })?;
    talk.finish()
}

#[test]
fn networks_that_drop_what_is_capable_of_it_get_it_without() {
    isolated(|| {
        Setup::new().rule(RULE).without_daemons().run(|net| {
            on_the_way(net, "ip ecn != not-ect counter drop")?;
            net.start()?;
            let talk = net.talk(7000)?;
            talk.advance(4 << 20)?;
            net.wait_bump(7000, "seal")?;
            let carried = || net.b.path("eth").ok()?["bytes_received"].as_u64();
            wait("data over the path that dropped it", || {
                talk.advance(256 << 10).is_ok() && carried() > Some(1 << 20)
            })?;
            talk.finish()?;
            let rules = net.b.host.run("nft list table netdev way")?;
            ensure!(
                !rules.contains("packets 0 "),
                "nothing was dropped: {rules}"
            );
            Ok(())
        })
    });
}
