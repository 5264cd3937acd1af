//! What becomes of a connection where its two ends want different things of it, and one of them did not
//! hear of it: a peer that does not answer, a choice without a session, a mark that somebody cleared.

use std::io::{Read as _, Write as _};

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::SOON;
use netns_tests::topology::server;
use netns_tests::traffic::connect;
use netns_tests::{Net, Setup, isolated};
use nix::sys::signal::Signal;

const RULE: &str = "bump = \"scramble\"\nprotocol = \"tcp\"\ndport = 7000";

/// Where the connection is, by each host's daemon.
fn is_on(net: &Net, bumps: [&str; 2]) -> Result<()> {
    let seen = [net.a.bumps(7000)?, net.b.bumps(7000)?];
    ensure!(seen == bumps.map(|bump| vec![bump.to_owned()]), "{seen:?}");
    Ok(())
}

/// Asks for plain while the peer's daemon stands still: as long as plain is to carry it, and come what may.
fn disable_in_vain(net: &mut Net) -> Result<()> {
    net.b.suspend()?;
    let disable = ["disable", "--dport", "7000"];
    let refusals =
        [&[][..], &["--force"]].map(|more| net.a.refused(&[&disable[..], more].concat()));
    net.b.go_on()?;
    let why = [
        "did not say whether the network carries it in plain",
        "did not answer",
    ];
    for (refusal, why) in refusals.into_iter().zip(why) {
        let refusal = refusal?;
        ensure!(refusal.contains(why), "{refusal}");
    }
    Ok(())
}

#[test]
fn a_peer_that_does_not_answer_leaves_a_rules_connection_on_its_bump() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            net.wait_bump(7000, "scramble")?;
            disable_in_vain(net)?;
            talk.advance(1 << 20)?;
            is_on(net, ["scramble", "scramble"])?;
            talk.finish()
        })
    });
}

/// However long that takes: what carries it is not taken away meanwhile, which would let it go on in plain.
#[test]
fn a_peer_that_does_not_answer_leaves_a_chosen_connection_on_its_bump() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            let started = net.a.host.run("ip -o link show dev dibs1")?;
            disable_in_vain(net)?;
            talk.advance(1 << 20)?;
            is_on(net, ["scramble", "scramble"])?;
            // The same device, with the number that it had.
            let device = net.a.host.run("ip -o link show dev dibs1")?;
            let number = |line: &str| line.split(':').next().map(str::to_owned);
            ensure!(number(&device) == number(&started), "{started}{device}");
            talk.finish()
        })
    });
}

#[test]
fn a_choice_without_a_session_gives_in_to_the_peers_rule() {
    isolated(|| {
        Setup::new().rule(RULE).run(|net| {
            let talk = net.talk(7000)?;
            talk.advance(256 << 10)?;
            net.wait_bump(7000, "scramble")?;
            net.a.stop(Signal::SIGKILL)?;
            net.b.stop(Signal::SIGTERM)?;
            net.b.start()?;
            let disable = ["disable", "--sport", "7000"];
            let refusal = net.b.refused(&disable)?;
            ensure!(refusal.contains("no session with the peer"), "{refusal}");
            net.b.ctl(&[&disable[..], &["--force"]].concat())?;
            let bumps = net.b.bumps(7000)?;
            ensure!(bumps == ["plain"], "{bumps:?}");
            net.a.start()?;
            net.wait_established()?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(1 << 20)?;
            is_on(net, ["scramble", "scramble"])?;
            talk.finish()
        })
    });
}

#[test]
fn a_cleared_mark_does_not_stall_what_the_far_end_requires() {
    isolated(|| {
        Setup::new().run(|net| {
            // There before the rule, of which the far end knows nothing: it only follows.
            let (mut near, mut far) = connect(&net.a.host, &net.b.host, server(7000))?;
            let rule = ["rule", "add", "--dport", "7000", "--bump", "scramble"];
            net.a.ctl(&[&rule[..], &["--require"]].concat())?;
            net.wait_bump(7000, "scramble")?;
            // By hand, after the next packet has left; then all is silent.
            let tables = "iptables -t mangle";
            let clears = "OUTPUT -p tcp --sport 7000 -j CONNMARK --set-xmark 0x0/0xf000000";
            let mut events = net.b.events()?;
            net.b.host.run(&format!("{tables} -A {clears}"))?;
            near.write_all(b"from a")?;
            let mut heard = [0; 6];
            far.read_exact(&mut heard)?;
            net.b.host.run(&format!("{tables} -D {clears}"))?;
            events.wait_for_output("marked", SOON)?;
            net.wait_bump(7000, "scramble")?;
            near.set_read_timeout(Some(SOON))?;
            far.write_all(b"from b")?;
            near.read_exact(&mut heard).context("b stalls")?;
            Ok(())
        })
    });
}
