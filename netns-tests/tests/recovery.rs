//! After an outage a connection goes on at once, and not when TCP would try again by itself.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use netns_tests::traffic::Talk;
use netns_tests::{Net, Node, Setup, isolated};
use nix::sys::signal::Signal;

/// TCP doubles its timeouts: after so long it tries again ten seconds later.
const OUTAGE: Duration = Duration::from_secs(15);
/// What going on may take on a machine that others keep busy; a second is what is aimed at.
const AT_ONCE: Duration = Duration::from_secs(4);

/// A connection on the bump, well under way.
fn bumped(net: &Net) -> Result<Talk> {
    let talk = net.talk(7000)?;
    talk.advance(256 << 10)?;
    net.a.enable(7000)?;
    net.wait_bump(7000, "scramble")?;
    // More than can still be under way in plain.
    talk.advance(2 << 20)?;
    Ok(talk)
}

/// Kills daemons, and starts them again after the outage.
fn outlives_a_crash(ends: impl Fn(&mut Net) -> Vec<&mut Node>) -> Result<()> {
    Setup::new().run(|net| {
        let mut ears = net.eavesdrop()?;
        let talk = bumped(net)?;
        ears.from_now();
        for node in ends(net) {
            node.stop(Signal::SIGKILL)?;
        }
        talk.stands_still(OUTAGE)?;
        let before = talk.received();
        let since = Instant::now();
        for node in ends(net) {
            node.spawn()?;
        }
        goes_on(&talk, before, since, "the restart")?;
        net.wait_established()?;
        talk.advance(2 << 20)?;
        net.wait_bump(7000, "scramble")?;
        let plaintexts = talk.plaintexts;
        talk.finish()?;
        ears.heard_nothing(&plaintexts, 4 << 20)
    })
}

/// Bytes arrive in both directions soon after `since`.
fn goes_on(talk: &Talk, before: [u64; 2], since: Instant, what: &str) -> Result<()> {
    let took = talk.moves_after(before, since)?;
    println!("first bytes after {what}: {took:?}");
    ensure!(
        took.iter().all(|took| *took <= AT_ONCE),
        "first bytes {took:?} after {what}"
    );
    Ok(())
}

#[test]
fn the_calling_daemon_is_away_for_long() {
    isolated(|| outlives_a_crash(|net| vec![&mut net.a]));
}

#[test]
fn the_called_daemon_is_away_for_long() {
    isolated(|| outlives_a_crash(|net| vec![&mut net.b]));
}

#[test]
fn both_daemons_are_away_for_long() {
    isolated(|| outlives_a_crash(|net| vec![&mut net.a, &mut net.b]));
}
