//! Daemons that cannot write what is to outlive them, as where the disk is full: what they cannot promise they
//! do not carry out, and they catch up once they can.

use anyhow::{Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::traffic::{SETTLED, abort, connect};
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;

/// It says so in time to be taken back, and what it could not do does not come up later.
#[test]
fn what_a_peer_could_not_carry_out_stands_nowhere() {
    isolated(|| {
        Setup::new().run(|net| {
            let new_session = |net: &mut Net| -> Result<()> {
                net.a.stop(Signal::SIGKILL)?;
                net.a.start()?;
                net.wait_established()
            };
            let talk = net.talk(7000)?;
            talk.advance(SETTLED)?;
            net.b.spoil_state()?;
            let said = net.a.refused(&["enable", "--dport", "7000"])?;
            ensure!(said.contains("the peer failed to move it"), "{said}");
            net.b.mend_state()?;
            new_session(net)?;
            talk.advance(SETTLED)?;
            net.wait_bump(7000, "plain")?;

            // Neither end has chosen anything for it: it left by a choice, and comes back by none.
            net.a
                .ctl(&["rule", "add", "--dport", "7000", "--bump", "seal"])?;
            net.wait_bump(7000, "seal")?;
            talk.advance(SETTLED)?;
            net.b.spoil_state()?;
            let said = net.a.refused(&["disable", "--dport", "7000"])?;
            ensure!(said.contains("the peer failed to move it"), "{said}");
            for again in [false, true] {
                talk.advance(SETTLED)?;
                net.wait_bump(7000, "seal")?;
                let ears = net.eavesdrop()?;
                talk.advance(SETTLED)?;
                ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
                net.wait_locked(7000)?;
                if !again {
                    net.b.mend_state()?;
                    new_session(net)?;
                }
            }
            talk.finish()
        })
    });
}

#[test]
fn what_a_peer_could_not_carry_out_it_does_once_it_can() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            net.b.stop(Signal::SIGKILL)?;
            // Of the choice it knows nothing any more.
            std::fs::remove_file(net.b.state_file())?;
            net.b.spoil_state()?;
            net.b.start()?;
            net.wait_established()?;
            wait("the choice to be told", || {
                net.b.log().contains("cannot move connections as it asked")
            })?;
            net.b.mend_state()?;
            wait("the choice to be carried out", || {
                net.b.saved().is_ok_and(|saved| saved.contains("7000"))
            })?;
            talk.advance(SETTLED)?;
            net.wait_locked(7000)?;
            talk.finish()
        })
    });
}

#[test]
fn what_could_not_be_saved_is_saved_later() {
    isolated(|| {
        Setup::new().run(|net| {
            // Keeps the bump's device: a reset that is read after its end would leave b with an open connection.
            let _other = connect(&net.a.host, &net.b.host, server(7001))?;
            net.a.enable(7001)?;
            let ends = connect(&net.a.host, &net.b.host, server(7000))?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            net.b.spoil_state()?;
            abort(ends)?;
            wait("the choice to be forgotten", || {
                net.b.log().contains("dibsd.state: ")
            })?;
            ensure!(net.b.saved()?.contains(":7000\""), "it was saved");
            net.b.mend_state()?;
            wait("the state to be saved", || {
                net.b.saved().is_ok_and(|saved| !saved.contains(":7000\""))
            })
        })
    });
}

/// The rule was gone until the next start, which found it in the file.
#[test]
fn a_rule_that_cannot_be_forgotten_stays_as_it_was() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            let made = net
                .a
                .ctl(&["rule", "add", "--dport", "7000", "--bump", "seal"])?;
            let id = made["id"].to_string();
            net.wait_bump(7000, "seal")?;
            net.a.spoil_state()?;
            let said = net.a.refused(&["rule", "del", &id])?;
            ensure!(
                said.contains(&format!("rule {id} was not changed")),
                "{said}"
            );
            let rules = net.a.ctl(&["rule", "list"])?;
            ensure!(rules[0]["id"] == id.parse::<u64>()?, "{rules}");
            talk.advance(SETTLED)?;
            net.wait_bump(7000, "seal")?;
            let later = net.talk(7000)?;
            net.wait_bump(7000, "seal")?;
            net.a.mend_state()?;
            net.a.ctl(&["rule", "del", &id])?;
            net.wait_bump(7000, "plain")?;
            talk.finish()?;
            later.finish()
        })
    });
}
