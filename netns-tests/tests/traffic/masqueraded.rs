//! Gateways that masquerade the network behind them: its live connections move, by the address that the far end knows.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use netns_tests::traffic::{SETTLED, Talk, connect_translated};
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;
use nix::unistd::geteuid;

use crate::gateway::{heard, unheard};

/// Rules of the uplinks of `a`, by which a connection has another port there as well.
const NFTABLES: &str = "nft add table ip home\n\
     nft 'add chain ip home out { type nat hook postrouting priority 100; }'\n\
     nft 'add rule ip home out oifname { eth0, wlan0 } meta l4proto tcp masquerade to :50000-50999'";
const IPTABLES: &str = "iptables -t nat -A POSTROUTING -o eth0 -p tcp -j MASQUERADE --to-ports 50000-50999\n\
     iptables -t nat -A POSTROUTING -o wlan0 -p tcp -j MASQUERADE --to-ports 50000-50999";
/// The address of `b` on the untrusted link.
fn untrusted(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 2, 2], port))
}

/// A connection of the network behind `a` to `b`.
fn talk(net: &Net, port: u16) -> Result<Talk> {
    let talk = Talk::start(&net.behind[0], &net.b.host, untrusted(port))?;
    talk.advance(SETTLED)?;
    Ok(talk)
}

/// Both names of the connection, as the gateway lists it.
fn names(net: &Net) -> Result<[SocketAddr; 2]> {
    let listed = net.a.ctl(&["conn", "list"])?;
    let name = |key: &str| -> Result<SocketAddr> {
        let name = listed[0][key]
            .as_str()
            .with_context(|| format!("{listed:#}"))?;
        Ok(name.parse()?)
    };
    Ok([name("local")?, name("local_there")?])
}

/// A transfer goes from plain to each bump and back, as either end asks.
fn moves(masquerade: &str) -> Result<()> {
    Setup::new().gateways().run(|net| {
        net.a.host.shell(masquerade)?;
        let talk = talk(net, 7000)?;
        for (by, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
            for bump in ["seal", "scramble", "plain", "share", "plain"] {
                by.put_on(bump, end, 7000)?;
                net.wait_bump(7000, bump)?;
                match bump {
                    "plain" => heard(net, &talk),
                    _ => unheard(net, &talk),
                }
                .with_context(|| bump.to_owned())?;
                let [own, there] = names(net)?;
                ensure!(own == talk.client, "{own}");
                let is_given = there.ip() == IpAddr::from([10, 0, 2, 1]);
                ensure!(
                    is_given && (50_000..51_000).contains(&there.port()),
                    "{there}"
                );
            }
        }
        talk.finish()
    })
}

#[test]
fn a_transfer_masqueraded_with_nftables_takes_each_bump_and_returns() {
    isolated(|| moves(NFTABLES));
}

#[test]
fn a_transfer_masqueraded_with_iptables_takes_each_bump_and_returns() {
    isolated(|| moves(IPTABLES));
}

#[test]
fn a_rule_of_either_end_moves_it() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            net.a.host.shell(NFTABLES)?;
            let talk = talk(net, 7000)?;
            for (by, end) in [(&net.a, "--dport"), (&net.b, "--sport")] {
                let rule = ["rule", "add", end, "7000", "--bump", "seal"];
                let made = by.ctl(&rule)?;
                net.wait_bump(7000, "seal")?;
                unheard(net, &talk)?;
                net.wait_locked(7000)?;
                by.ctl(&["rule", "del", &made["id"].to_string()])?;
                net.wait_bump(7000, "plain")?;
                heard(net, &talk)?;
            }
            talk.finish()
        })
    });
}

/// The far host moves first, and asks the gateway, whose own mark is not there yet, to follow.
#[test]
fn a_rule_that_ends_lets_go_of_it_also_after_a_restart() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            net.a.host.shell(NFTABLES)?;
            let talk = talk(net, 7000)?;
            for _ in 0..3 {
                net.a.stop(Signal::SIGKILL)?;
                net.a.start()?;
                net.wait_established()?;
                let rule = ["rule", "add", "--dport", "7000", "--bump", "seal"];
                let made = net.a.ctl(&rule)?;
                net.wait_bump(7000, "seal")?;
                // The far end was asked whether it knows the connection, and is not to fall silent for that.
                let began = Instant::now();
                talk.advance(64 << 10)?;
                let took = began.elapsed();
                ensure!(took < Duration::from_secs(1), "{took:?}");
                talk.advance(SETTLED)?;
                net.a.ctl(&["rule", "del", &made["id"].to_string()])?;
                net.wait_bump(7000, "plain")?;
            }
            heard(net, &talk)?;
            talk.finish()
        })
    });
}

/// The kernel would end the connection there, or take it for one of the gateway itself.
#[test]
fn nothing_of_it_is_plain_or_ends_while_others_flush_or_a_daemon_is_away() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            net.a.host.shell(NFTABLES)?;
            let talk = talk(net, 7000)?;
            net.a.put_on("seal", "--dport", 7000)?;
            net.wait_locked(7000)?;
            talk.advance(SETTLED)?;
            let ears = net.eavesdrop()?;
            for flush in [
                "iptables -t mangle -F",
                "iptables -F",
                "conntrack -F",
                "nft flush ruleset",
            ] {
                net.a.host.run(flush)?;
                talk.advance(SETTLED).context(flush)?;
                net.wait_bump(7000, "seal")?;
            }
            net.wait_locked(7000)?;
            for signal in [Signal::SIGKILL, Signal::SIGTERM] {
                net.a.stop(signal)?;
                net.a.start()?;
                net.wait_established()?;
                talk.advance(SETTLED)?;
                net.b.stop(signal)?;
                net.b.start()?;
                net.wait_established()?;
                talk.advance(SETTLED)?;
            }
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            net.wait_locked(7000)?;
            net.a.put_on("plain", "--dport", 7000)?;
            heard(net, &talk)?;
            talk.finish()
        })
    });
}

#[test]
fn what_the_peer_cannot_know_by_its_address_is_refused_and_unharmed() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            net.a.host.shell(NFTABLES)?;
            let elsewhere = "iptables -t nat -A PREROUTING -i in0 -p tcp --dport 7001 -j DNAT --to 10.0.2.2:7002";
            net.a.host.run(elsewhere)?;
            let ends = [untrusted(7002), untrusted(7001)];
            let conn = connect_translated(geteuid(), 0, &net.behind[0], &net.b.host, ends)?;
            let talk = Talk::over(&net.behind[0], &net.b.host, conn)?;
            talk.advance(SETTLED)?;
            let said = net.a.refused(&["enable", "--dport", "7001", "--bump", "seal"])?;
            ensure!(said.contains("translates its address"), "{said}");
            let said = net.b.refused(&["enable", "--sport", "7002", "--bump", "seal"])?;
            ensure!(said.contains("peer"), "{said}");
            talk.advance(SETTLED)?;
            talk.finish()
        })
    });
}

/// The kernel forgets what it masquerades by an interface that goes down, and the address is none of the gateway's meanwhile.
#[test]
fn on_a_bump_it_goes_on_once_the_uplink_is_back_by_which_it_began() {
    isolated(|| {
        Setup::new().gateways().run(|net| {
            net.a.host.shell(IPTABLES)?;
            let talk = talk(net, 7000)?;
            net.a.put_on("seal", "--dport", 7000)?;
            net.wait_locked(7000)?;
            net.a.host.run("ip link set wlan0 down")?;
            net.a.wait_path("wlan", "down")?;
            net.a.host.run("ip link set wlan0 up")?;
            talk.advance(SETTLED)?;
            net.a.put_on("plain", "--dport", 7000)?;
            heard(net, &talk)?;
            talk.finish()
        })
    });
}
