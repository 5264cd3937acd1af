mod fake;

use dibs_settings::BumpId;
use fake::{Fake, State};
use proptest::prelude::*;

use super::*;
use crate::{Binding, BumpRoute, ClassRule, DeviceOwner, Hop};

fn bump(id: u8) -> BumpRoute {
    let (device, owner) = match id {
        9.. => (format!("tun{id}"), DeviceOwner::Foreign),
        _ => (format!("dibs{id}"), DeviceOwner::Ours),
    };
    BumpRoute {
        id: BumpId::new(id).unwrap(),
        device: DeviceName::new(&device).unwrap(),
        owner,
        addresses: vec!["10.0.1.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        peers: vec![
            "10.0.1.2/32".parse().unwrap(),
            "fd00::2/128".parse().unwrap(),
        ],
    }
}

fn wish(bumps: &[u8], rules: &[u8]) -> Desired {
    let rule = |(n, id): (usize, &u8)| ClassRule {
        dport: Some((n as u16 + 80).into()),
        binding: [Binding::Loose, Binding::Required, Binding::Pinned][n % 3],
        ..ClassRule::tcp(n as u32, BumpId::new(*id).unwrap())
    };
    Desired {
        bumps: bumps.iter().map(|id| bump(*id)).collect(),
        rules: rules.iter().enumerate().map(rule).collect(),
        ..Desired::default()
    }
}

fn wishes() -> Vec<Desired> {
    let mut one_family = wish(&[1, 2], &[2]);
    one_family
        .bumps
        .iter_mut()
        .for_each(|bump| bump.peers.truncate(1));
    vec![
        Desired::default(),
        wish(&[1], &[]),
        wish(&[1], &[1, 1]),
        wish(&[2], &[2]),
        wish(&[1, 2, 9], &[9, 1, 2, 9]),
        wish(&[9], &[9]),
        one_family,
        Desired {
            table_base: 7000,
            rule_priority: 99,
            ..wish(&[1, 9], &[1])
        },
    ]
}

fn fake() -> Fake {
    Fake::new(
        &["dibs1", "dibs2", "tun9"],
        no_marked_packet_can_leave_in_plain,
    )
}

/// Wherever marks are set, every one of them meets the guard, and every class rule's leads to a closed table.
fn no_marked_packet_can_leave_in_plain(state: &State) {
    for (family, chains) in &state.chains {
        let rules = |name: &str| chains.get(&(Table::Mangle, name.to_owned()));
        let first = |hook: &str| rules(hook).and_then(|rules| rules.first().cloned());
        if first("OUTPUT").is_none_or(|rule| rule != "-j DIBS-OUTPUT") {
            continue;
        }
        assert_eq!(first("POSTROUTING").as_deref(), Some("-j DIBS-POSTROUTING"));
        let guard = rules("DIBS-POSTROUTING").expect("the guard stands");
        assert_eq!(guard.last().map(String::as_str), Some("-j DROP"));
        let steer = rules("DIBS-STEER").expect("it has somewhere to go");
        for id in 1..=14 {
            let sets = ["SET", "LOCK"].map(|how| format!("-g DIBS-{how}-{id}"));
            if !steer
                .iter()
                .any(|rule| sets.iter().any(|set| rule.ends_with(set)))
            {
                continue;
            }
            let mark = MarkLayout::default().bump(BumpId::new(id).unwrap());
            let rules = state
                .network
                .rules
                .iter()
                .filter(|rule| rule.family == *family);
            let mut tables = rules
                .filter(|rule| rule.mark.is_some_and(|(value, _)| value == mark))
                .map(|rule| rule.table);
            let closed = |table| {
                state.network.routes.iter().any(|route| {
                    (route.table, &route.hop) == (table, &Hop::Blackhole)
                        && route.destination == family.any()
                })
            };
            assert!(tables.any(closed), "bump {id} is routed, and closed");
        }
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(future)
}

fn steering(fake: &Fake) -> Steering<Fake, Fake> {
    Steering::new(fake.clone(), fake.clone(), None)
}

/// What is ours, whatever was done to the devices on the way.
fn state(fake: &Fake) -> State {
    let mut state = fake.host().state.clone();
    state.network.links.clear();
    state
}

fn fresh(wish: &Desired) -> State {
    let fake = fake();
    block_on(steering(&fake).set(wish)).unwrap();
    state(&fake)
}

#[test]
fn nothing_wanted_runs_nothing_that_changes() {
    let fake = fake();
    let before = state(&fake);
    assert_eq!(
        block_on(steering(&fake).set(&Desired::default())).unwrap(),
        Report::default()
    );
    assert_eq!(state(&fake), before);
}

#[test]
fn a_second_time_there_is_nothing_to_do() {
    for wish in wishes() {
        let fake = fake();
        let mut steering = steering(&fake);
        block_on(steering.set(&wish)).unwrap();
        assert_eq!(block_on(steering.set(&wish)).unwrap(), Report::default());
    }
}

#[test]
fn an_impossible_wish_changes_nothing() {
    let fake = fake();
    let before = state(&fake);
    let error = block_on(steering(&fake).set(&wish(&[1], &[2]))).unwrap_err();
    assert!(matches!(error, Error::Invalid(_)));
    assert_eq!(state(&fake), before);
}

#[test]
fn cleanup_clears_marks_of_ours_and_of_nobody_else() {
    let fake = fake();
    fake.host().state.ctmarks = vec![0x42, 0x0100_0042, 0x3000_0000, 0xc000_0000];
    let before = state(&fake);
    block_on(steering(&fake).set(&wish(&[1, 2], &[1]))).unwrap();
    assert_eq!(state(&fake).ctmarks, before.ctmarks);
    block_on(steering(&fake).set(&wish(&[1], &[1]))).unwrap();
    assert_eq!(
        state(&fake).ctmarks,
        before.ctmarks,
        "bump 2 had no connections"
    );
    block_on(steering(&fake).cleanup(MarkLayout::default())).unwrap();
    let after = state(&fake);
    assert_eq!(after.ctmarks, [0x42, 0x42, 0, 0xc000_0000]);
    assert_eq!(after.chains, before.chains);
    assert_eq!(after.network, before.network);
}

#[test]
fn who_keeps_undoing_is_not_fought_for_ever() {
    let fake = fake();
    // Another program that empties the guard after each change.
    fake.host().check = |_| {};
    struct Vandal(Fake);
    impl CommandRunner for Vandal {
        async fn run(&self, command: &Command) -> Result<String, Error> {
            let done = self.0.run(command).await;
            let mut host = self.0.host();
            let chains = host.state.chains.get_mut(&Family::V4).unwrap();
            chains
                .get_mut(&(Table::Mangle, "OUTPUT".into()))
                .unwrap()
                .clear();
            done
        }
    }
    let mut steering = Steering::new(Vandal(fake.clone()), fake, None);
    let error = block_on(steering.set(&wish(&[1], &[1]))).unwrap_err();
    assert!(matches!(error, Error::Undone(_)), "{error}");
}

#[test]
fn a_default_that_does_not_work_is_passed_over() {
    /// A host whose `iptables` is of a kind that its kernel does not have.
    struct OnlyNft(Fake);
    impl CommandRunner for OnlyNft {
        async fn run(&self, command: &Command) -> Result<String, Error> {
            let refuse = |stderr: &str| Error::Command {
                command: command.to_string(),
                line: None,
                stderr: stderr.to_owned(),
            };
            match command.program.split_once("-nft") {
                _ if command.arguments == ["--version"] => Ok("(nf_tables)".to_owned()),
                Some((name, verb)) => {
                    let command = Command {
                        program: format!("{name}{verb}"),
                        ..command.clone()
                    };
                    self.0.run(&command).await
                }
                None => Err(refuse(
                    "can't initialize iptables table `mangle': no such table",
                )),
            }
        }
    }
    let fake = fake();
    let mut steering = Steering::new(OnlyNft(fake.clone()), fake.clone(), None);
    let wish = wish(&[1], &[1]);
    block_on(steering.set(&wish)).unwrap();
    assert_eq!(state(&fake), fresh(&wish));
    assert_eq!(block_on(steering.set(&wish)).unwrap(), Report::default());
}

#[test]
fn cleanup_without_rights_is_an_error() {
    struct Forbidden;
    impl CommandRunner for Forbidden {
        async fn run(&self, command: &Command) -> Result<String, Error> {
            let stderr =
                "Could not fetch rule set generation id: Permission denied (you must be root)";
            Err(Error::Command {
                command: command.to_string(),
                line: None,
                stderr: stderr.into(),
            })
        }
    }
    let mut steering = Steering::new(Forbidden, fake(), None);
    let error = block_on(steering.cleanup(MarkLayout::default())).unwrap_err();
    assert!(error.to_string().contains("you must be root"), "{error}");
}

#[test]
fn futures_can_be_spawned() {
    fn sendable<T: Send>(value: T) -> T {
        value
    }
    async fn set(mut steering: Steering, wish: Desired) -> Result<Report, Error> {
        steering.set(&wish).await
    }
    let _ = |steering, wish| sendable(set(steering, wish));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Each wish leads to the same state, whatever was before, and safely all the way.
    #[test]
    fn any_order_of_wishes_ends_the_same(order in prop::collection::vec(0..8usize, 1..8)) {
        let (fake, wishes) = (fake(), wishes());
        let mut steering = steering(&fake);
        for n in order {
            block_on(steering.set(&wishes[n])).unwrap();
            prop_assert_eq!(state(&fake), fresh(&wishes[n]));
        }
    }

    /// So it does when the daemon dies on the way and another one goes on with another wish.
    #[test]
    fn a_death_on_the_way_is_made_good(
        first in 0..8usize, second in 0..8usize, third in 0..8usize, steps in 0..40usize,
    ) {
        let (fake, wishes) = (fake(), wishes());
        block_on(steering(&fake).set(&wishes[first])).unwrap();
        fake.host().fail_after = Some(steps);
        let _cut_short = block_on(steering(&fake).set(&wishes[second]));
        fake.host().fail_after = None;
        block_on(steering(&fake).set(&wishes[third])).unwrap();
        prop_assert_eq!(state(&fake), fresh(&wishes[third]));
        block_on(steering(&fake).cleanup(MarkLayout::default())).unwrap();
        prop_assert_eq!(state(&fake), fresh(&Desired::default()));
    }
}
