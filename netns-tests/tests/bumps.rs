//! Each bump, and one after the other in a live connection.

use anyhow::{Result, ensure};
use dibs_lab::End;
use netns_tests::{Dice, Setup, isolated};

/// What a connection can be on.
const ALL: [&str; 3] = ["plain", "scramble", "seal"];

#[test]
fn sealed_data_is_read_nowhere() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = 7000";
        Setup::new().rule(rule).run(|net| {
            let ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            talk.advance(4 << 20)?;
            net.wait_bump(7000, "seal")?;
            let plaintexts = talk.plaintexts;
            talk.finish()?;
            ears.heard_nothing(&plaintexts, 8 << 20)
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
        Setup::new().run(|net| {
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
    Setup::new().run(|net| {
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

/// Takes minutes: `cargo xtask test` has the short one.
#[test]
#[ignore = "takes minutes"]
fn a_thousand_times() {
    isolated(|| at_random(1000, 12));
}
