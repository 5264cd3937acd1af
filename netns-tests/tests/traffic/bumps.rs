//! Each bump, and one after the other in a live connection.

use anyhow::{Result, ensure};
use dibs_lab::End;
use netns_tests::daemon::wait;
use netns_tests::{Dice, Setup, isolated, vpn};
use nix::sys::signal::Signal;
use serde_json::Value;

/// What a connection can be on.
const ALL: [&str; 5] = ["plain", "scramble", "share", "seal", "vpn"];

fn is_read_nowhere(bump: &str) -> Result<()> {
    let rule = format!("bump = \"{bump}\"\ndport = 7000");
    Setup::new().rule(&rule).run(|net| {
        let ears = net.eavesdrop()?;
        let talk = net.talk(7000)?;
        talk.advance(4 << 20)?;
        net.wait_bump(7000, bump)?;
        talk.finish_unheard(ears, 8 << 20)
    })
}

#[test]
fn sealed_data_is_read_nowhere() {
    isolated(|| is_read_nowhere("seal"));
}

#[test]
fn shared_data_is_read_nowhere() {
    isolated(|| is_read_nowhere("share"));
}

#[test]
fn shared_data_waits_for_a_path_too_few() {
    isolated(|| {
        let rule = "bump = \"share\"\ndport = 7000";
        Setup::new().rule(rule).run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(1 << 20)?;
            net.wlan.down(End::A)?;
            let eth = || net.a.path("eth");
            wait("shares to wait", || {
                let waits = |path: Value| path["reason"].to_string().contains("fewer paths");
                eth().is_ok_and(waits)
            })?;
            let (before, sent) = (talk.received(), eth()?["bytes_sent"].as_u64());
            // It keeps the session alive, and carries nothing else.
            wait("keepalives", || {
                eth().is_ok_and(|path| path["bytes_sent"].as_u64() > sent.map(|n| n + 100))
            })?;
            ensure!(talk.received() == before, "{before:?} received before");
            net.wlan.up(End::A)?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

#[test]
fn who_splits_otherwise_is_refused() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            let file = net.b.directory().join("dibsd.toml");
            let third = "[[bump]]\nname = \"share\"\nkind = \"share\"\nshares = 3\nneeded = 2\n\
                         [[path]]\nname = \"third\"\ninterface = \"lo\"\ntrust = \"untrusted\"\n";
            let config = std::fs::read_to_string(&file)? + third;
            net.b.stop(Signal::SIGTERM)?;
            net.b.configure(&config)?;
            net.b.start()?;
            wait("a new session", || {
                net.a.counter("peer_restarts").is_ok_and(|n| n == 1)
            })?;
            let said = net
                .a
                .refused(&["enable", "--dport", "7000", "--bump", "share"])?;
            ensure!(said.contains("2 of 3 shares"), "{said}");
            let said = net
                .a
                .refused(&["rule", "add", "--dport", "7000", "--bump", "share"])?;
            ensure!(said.contains("2 of 3 shares"), "{said}");
            talk.advance(1 << 20)?;
            net.wait_bump(7000, "plain")?;
            talk.finish()
        })
    });
}

#[test]
fn sealed_data_needs_no_trusted_path() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = 7000";
        Setup::new().rule(rule).run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(1 << 20)?;
            net.eth.down(End::A)?;
            talk.advance(2 << 20)?;
            net.eth.up(End::A)?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

#[test]
fn from_each_to_each() {
    isolated(|| {
        vpn::with(vpn::WIREGUARD_GO).run(|net| {
            let _vpn = vpn::wireguard_go(net)?;
            let talk = net.talk(7000)?;
            for from in ALL {
                for to in ALL.into_iter().filter(|to| *to != from) {
                    net.a.put_on(from, "--dport", 7000)?;
                    talk.advance(200 << 10)?;
                    net.b.put_on(to, "--sport", 7000)?;
                    net.wait_bump(7000, to)?;
                    talk.advance(200 << 10)?;
                }
            }
            talk.finish()
        })
    });
}

fn at_random(rounds: u64, seed: u64) -> Result<()> {
    vpn::with(vpn::WIREGUARD_GO).run(|net| {
        let _vpn = vpn::wireguard_go(net)?;
        let talk = net.talk(7000)?;
        let mut dice = Dice(seed);
        let mut on = "plain";
        for round in 0..rounds {
            talk.advance(dice.below(1 << 18))?;
            on = ALL[dice.below(ALL.len() as u64) as usize];
            let (node, end) = match dice.below(2) {
                0 => (&net.a, "--dport"),
                _ => (&net.b, "--sport"),
            };
            let moved = node.put_on(on, end, 7000);
            ensure!(moved.is_ok(), "round {round}, to {on}: {moved:?}");
        }
        net.wait_bump(7000, on)?;
        talk.advance(1 << 20)?;
        talk.finish()
    })
}

#[test]
fn at_random_moments_by_either_host() {
    isolated(|| at_random(40, 11));
}

/// A thousand switches, which take minutes; `cargo xtask test` has the short one.
mod a_thousand_times {
    use super::*;

    #[test]
    #[ignore = "takes a minute or two"]
    fn first_quarter() {
        isolated(|| at_random(250, 12));
    }

    #[test]
    #[ignore = "takes a minute or two"]
    fn second_quarter() {
        isolated(|| at_random(250, 13));
    }

    #[test]
    #[ignore = "takes a minute or two"]
    fn third_quarter() {
        isolated(|| at_random(250, 14));
    }

    #[test]
    #[ignore = "takes a minute or two"]
    fn fourth_quarter() {
        isolated(|| at_random(250, 15));
    }
}
