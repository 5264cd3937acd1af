//! Daemons end, in good order and otherwise, under a connection on a bump.

use std::time::Duration;

use anyhow::{Result, ensure};
use dibs_lab::End;
use netns_tests::kernel;
use netns_tests::topology::server_v6;
use netns_tests::traffic::Talk;
use netns_tests::{Net, Node, Setup, isolated};
use nix::sys::signal::Signal;

/// Kills daemons and starts them again: the connection waits meanwhile, loses nothing, stays on the
/// bump, and is never in plain.
fn survives(signal: Signal, ends: impl Fn(&mut Net) -> Vec<&mut Node>) -> Result<()> {
    Setup::new().run(|net| {
        let mut ears = net.eavesdrop()?;
        let talk = net.bumped()?;
        ears.from_now();
        for node in ends(net) {
            node.stop(signal)?;
        }
        talk.stands_still(Duration::from_secs(1))?;
        for node in ends(net) {
            node.start()?;
        }
        net.wait_established()?;
        talk.advance(2 << 20)?;
        net.wait_bump(7000, "scramble")?;
        talk.finish_unheard(ears, 4 << 20)
    })
}

#[test]
fn the_calling_daemon_is_killed() {
    isolated(|| survives(Signal::SIGKILL, |net| vec![&mut net.a]));
}

#[test]
fn the_called_daemon_is_killed() {
    isolated(|| survives(Signal::SIGKILL, |net| vec![&mut net.b]));
}

#[test]
fn both_daemons_are_killed() {
    isolated(|| survives(Signal::SIGKILL, |net| vec![&mut net.a, &mut net.b]));
}

#[test]
fn a_daemon_is_stopped_and_started() {
    isolated(|| survives(Signal::SIGTERM, |net| vec![&mut net.a]));
}

#[test]
fn an_address_that_its_interface_has_lost() {
    isolated(|| {
        Setup::new().run(|net| {
            let mut ears = net.eavesdrop()?;
            let talk = Talk::start(&net.a.host, &net.b.host, server_v6(7000))?;
            talk.advance(256 << 10)?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(2 << 20)?;
            ears.from_now();
            // Linux takes the IPv6 addresses of an interface that goes down, and gives none back.
            net.eth.down(End::A)?;
            net.eth.up(End::A)?;
            talk.advance(1 << 20)?;
            for signal in [Signal::SIGKILL, Signal::SIGTERM] {
                net.a.stop(signal)?;
                net.a.start()?;
                talk.advance(1 << 20)?;
            }
            net.wait_bump(7000, "scramble")?;
            talk.finish_unheard(ears, 4 << 20)
        })
    });
}

#[test]
fn rules_outlive_a_crash() {
    isolated(|| {
        Setup::new().run(|net| {
            let made = net
                .a
                .ctl(&["rule", "add", "--dport", "7000", "--bump", "scramble"])?;
            net.a.stop(Signal::SIGKILL)?;
            net.a.start()?;
            net.wait_established()?;
            let rules = net.a.ctl(&["rule", "list"])?;
            ensure!(
                rules.as_array().is_some_and(|rules| rules.contains(&made)),
                "{rules:#}"
            );
            let ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            talk.advance(1 << 20)?;
            net.wait_bump(7000, "scramble")?;
            talk.finish_unheard(ears, 2 << 20)
        })
    });
}

#[test]
fn a_stopped_daemon_lets_go_if_so_configured() {
    isolated(|| {
        Setup::new()
            .key("fail = \"open\"")
            .without_daemons()
            .run(|net| {
                let before = [kernel::state(&net.a.host)?, kernel::state(&net.b.host)?];
                net.start()?;
                let talk = net.bumped()?;
                net.a.stop(Signal::SIGTERM)?;
                net.b.stop(Signal::SIGTERM)?;
                talk.advance(1 << 20)?;
                talk.finish()?;
                let after = [kernel::state(&net.a.host)?, kernel::state(&net.b.host)?];
                ensure!(before == after, "{before:#?} became {after:#?}");
                Ok(())
            })
    });
}
