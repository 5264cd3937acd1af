//! Bumps go into live connections and out of them.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::traffic::{SETTLED, Talk, connect, next_plaintext};
use netns_tests::{Dice, Net, Node, Setup, isolated};
use serde_json::Value;

/// Switches the connections to port 7000 of `b`, on one host or the other.
fn switch(net: &Net, on_a: bool, into: bool) -> Result<()> {
    let command = if into { "enable" } else { "disable" };
    if on_a {
        net.a.switch(command, "--dport", 7000)
    } else {
        net.b.switch(command, "--sport", 7000)
    }
}

#[test]
fn in_and_out_again() {
    isolated(|| {
        Setup::new().run(|net| {
            let ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            let while_settled = || -> Result<Range<SystemTime>> {
                talk.advance(SETTLED)?;
                let start = SystemTime::now();
                talk.advance(SETTLED)?;
                Ok(start..SystemTime::now())
            };
            let before = while_settled()?;
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            let bumped = while_settled()?;
            net.a.disable(7000)?;
            net.wait_bump(7000, "plain")?;
            let after = while_settled()?;

            let heard = ears.finish()?;
            let plain = |during| heard.plain(&talk.plaintexts, during);
            ensure!(plain(&bumped) == [0, 0], "bumped: {:?}", plain(&bumped));
            for during in [&before, &after] {
                let [eth, wlan] = plain(during);
                ensure!(eth > 0 && wlan == 0, "{eth} on eth, {wlan} on wlan");
            }
            talk.finish()
        })
    });
}

#[test]
fn at_random_moments_by_either_host() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.talk(7000)?;
            let mut dice = Dice(7);
            for round in 0..16 {
                talk.advance(dice.below(1 << 20))?;
                switch(net, dice.below(2) == 0, round % 2 == 0)?;
            }
            for into in [true, false, true] {
                for on_a in [true, false] {
                    switch(net, on_a, into)?;
                }
            }
            net.wait_bump(7000, "scramble")?;
            talk.advance(1 << 20)?;
            talk.finish()
        })
    });
}

/// The bump of each connection to port 7000, by its client's end.
fn bumps(node: &Node) -> Result<BTreeMap<String, String>> {
    let conns = node.ctl(&["conn", "list"])?;
    let conns = conns.as_array().context("conn list is an array")?;
    let text = |conn: &Value, key| conn[key].as_str().map(str::to_owned).context("no text");
    let bump = |conn: &Value| {
        let ends = [text(conn, "local")?, text(conn, "remote")?];
        let client = ends.into_iter().find(|end| !end.ends_with(":7000"));
        Ok((client.context("no client")?, text(conn, "bump")?))
    };
    conns.iter().map(bump).collect()
}

#[test]
fn crossed_commands_converge() {
    isolated(|| {
        Setup::new().run(|net| {
            let talks = [net.talk(7000)?, net.talk(7000)?];
            let mut dice = Dice(11);
            for round in 0..10 {
                // At first at once, and against each other; then as it happens.
                let at_random = round >= 4;
                let mut plan = |on_a: bool| match at_random {
                    true => (dice.below(2) == 0, dice.below(512 << 10)),
                    false => ((round % 2 == 0) == on_a, 0),
                };
                let plans = [plan(true), plan(false)];
                let (net, talk) = (&*net, &talks[round % 2]);
                std::thread::scope(|scope| {
                    let commands = [true, false].map(|on_a| {
                        let (into, after) = plans[usize::from(!on_a)];
                        scope.spawn(move || {
                            talk.advance(after).and_then(|()| switch(net, on_a, into))
                        })
                    });
                    // One of the two may learn that the other was first.
                    let done = commands.map(|command| command.join().expect("no panic"));
                    let both = || format!("round {round}: both were refused: {done:#?}");
                    ensure!(done.iter().any(Result::is_ok), both());
                    Ok(())
                })?;
                let mut seen = Vec::new();
                let agree = || {
                    seen = vec![bumps(&net.a), bumps(&net.b)];
                    matches!(&seen[..], [Ok(a), Ok(b)] if a.len() == 2 && a == b)
                };
                wait("the hosts to agree", agree)
                    .with_context(|| format!("round {round}, {plans:?}: {seen:#?}"))?;
                let agreed = bumps(&net.a)?;
                for talk in &talks {
                    talk.advance(128 << 10)?;
                }
                let after = [bumps(&net.a)?, bumps(&net.b)?];
                ensure!(
                    after.iter().all(|bumps| *bumps == agreed),
                    "round {round}, {plans:?}: {agreed:#?}, then {after:#?}"
                );
            }
            talks.into_iter().try_for_each(Talk::finish)
        })
    });
}

#[test]
fn an_idle_connection_on_which_the_far_side_speaks_next() {
    isolated(|| {
        Setup::new().run(|net| {
            let (mut near, mut far) = connect(&net.a.host, &net.b.host, server(7000))?;
            net.a.enable(7000)?;
            let moved = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
            let ears = net.eavesdrop()?;
            let plaintext = next_plaintext();
            let mut message = vec![0; 64 << 10];
            plaintext.fill(0, &mut message);
            let speaking = message.clone();
            let speaker = std::thread::spawn(move || far.write_all(&speaking));
            let mut received = vec![0; message.len()];
            near.read_exact(&mut received)?;
            speaker.join().expect("no panic")?;
            ensure!(received == message, "other bytes arrived");
            for node in [&net.a, &net.b] {
                let since = node.ctl(&["conn", "list"])?[0]["since"].as_f64();
                let since = since.context("no time")?;
                // Nobody had asked before.
                ensure!(since < moved.as_secs_f64(), "{since} is after {moved:?}");
            }
            ears.heard_nothing(&[plaintext], message.len())
        })
    });
}

#[test]
fn a_class_rule_moves_an_established_connection() {
    isolated(|| {
        Setup::new().run(|net| {
            let mut ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            let other = net.talk(7001)?;
            talk.advance(256 << 10)?;
            let made = net
                .a
                .ctl(&["rule", "add", "--dport", "7000", "--bump", "scramble"])?;
            net.wait_bump(7000, "scramble")?;
            net.wait_bump(7001, "plain")?;
            talk.advance(SETTLED)?;
            ears.from_now();
            talk.advance(SETTLED)?;
            ears.heard_nothing(&talk.plaintexts, 2 * SETTLED as usize)?;

            let id = made["id"].to_string();
            net.a.ctl(&["rule", "del", &id])?;
            net.wait_bump(7000, "plain")?;
            talk.advance(256 << 10)?;
            talk.finish()?;
            other.finish()
        })
    });
}
