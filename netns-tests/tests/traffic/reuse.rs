//! Connections that take the ends of earlier ones: what was chosen for those is not theirs, nor what was
//! still to be said of them.

use std::time::Duration;

use anyhow::{Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::traffic::{Talk, abort, connect_from};
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;
use socket2::SockRef;

const RULE: &str = "bump = \"scramble\"\nprotocol = \"tcp\"\ndport = 7000";
/// From here.
const PORT: u16 = 45_000;

fn connect(net: &Net) -> Result<(std::net::TcpStream, std::net::TcpStream)> {
    connect_from(PORT, &net.a.host, &net.b.host, server(7000))
}

fn talks_on(net: &Net, bump: &str, ends: (std::net::TcpStream, std::net::TcpStream)) -> Result<()> {
    let talk = Talk::over(&net.a.host, &net.b.host, ends)?;
    talk.advance(256 << 10)?;
    net.wait_bump(7000, bump)?;
    talk.advance(1 << 20)?;
    for host in [&net.a, &net.b] {
        let seen = host.bumps(7000)?;
        ensure!(seen == [bump], "host {}: {seen:?}", host.host.name());
    }
    talk.finish()
}

#[test]
fn a_choice_ends_with_its_connection() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let first = connect(net)?;
            net.wait_bump(7000, "scramble")?;
            net.a.disable(7000)?;
            net.wait_bump(7000, "plain")?;
            abort(first)?;
            // Before anybody has looked for connections that ended.
            let second = connect(net)?;
            talks_on(net, "scramble", second)
        })
    });
}

#[test]
fn a_connection_that_ended_while_no_daemon_looked_is_not_tracked_again() {
    isolated(|| {
        Setup::new().run(|net| {
            let ends = connect(net)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            for node in [&mut net.a, &mut net.b] {
                node.stop(Signal::SIGKILL)?;
            }
            let (near, far) = ends;
            for end in [near, far] {
                SockRef::from(&end).set_linger(Some(Duration::ZERO))?;
            }
            for node in [&mut net.a, &mut net.b] {
                node.host.run("conntrack -D -p tcp")?;
                node.start()?;
            }
            net.wait_established()?;
            for node in [&net.a, &net.b] {
                let tracked = || {
                    let listed = node.host.run("conntrack -L -p tcp");
                    listed.map(|listed| listed.contains(&PORT.to_string()))
                };
                let mut seen = false;
                wait("the choice to be forgotten", || {
                    seen |= tracked().unwrap_or(true);
                    node.saved()
                        .is_ok_and(|saved| !saved.contains(&PORT.to_string()))
                })?;
                ensure!(!seen && !tracked()?, "tracked at {}", node.host.name());
            }
            Ok(())
        })
    });
}

/// Its kernel's timestamps begin anywhere, as after a restart.
#[test]
fn a_host_whose_clock_for_timestamps_is_another_connects_from_the_same_port() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            // By the offset of the two, one of the turns goes back.
            for offset in [1, 2, 1] {
                let sysctl = format!("sysctl -q -w net.ipv4.tcp_timestamps={offset}");
                net.a.host.run(&sysctl)?;
                let ends = connect(net)?;
                net.wait_bump(7000, "scramble")?;
                abort(ends)?;
            }
            Ok(())
        })
    });
}

#[test]
fn a_word_that_waited_moves_no_later_connection() {
    isolated(|| {
        Setup::new().run(|net| {
            let first = connect(net)?;
            // Nobody but the daemons is kept from speaking, by either link.
            let withhold = "PREROUTING -p udp --dport 5300 -j DROP";
            net.b.host.run(&format!("iptables -t raw -I {withhold}"))?;
            let refusal = net.a.refused(&["enable", "--dport", "7000"])?;
            ensure!(refusal.contains("did not answer"), "{refusal}");
            abort(first)?;
            let second = connect(net)?;
            net.b.host.run(&format!("iptables -t raw -D {withhold}"))?;
            net.wait_established()?;
            let seen = net.b.bumps(7000)?;
            ensure!(seen == ["plain"], "{seen:?}");
            // By no choice, so it follows where rules put it.
            net.a
                .ctl(&["rule", "add", "--dport", "7000", "--bump", "scramble"])?;
            talks_on(net, "scramble", second)
        })
    });
}
