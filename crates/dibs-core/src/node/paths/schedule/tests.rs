//! Schedulers over plain numbers: what they pick of which offers.

use super::*;

const MS: Duration = Duration::from_millis(1);

/// A path of 10 Mbyte/s that has room, and takes half its round trip to deliver.
fn offer(srtt: u32) -> Offer {
    let srtt = srtt * MS;
    Offer {
        srtt,
        cwnd: 100_000,
        in_flight: 0,
        mtu: 1400,
        rate: 10_000_000,
        budget: 10_000,
        delivery: srtt / 2,
        acknowledgement: srtt,
        turn: 0,
        is_ample: false,
        is_avoided: false,
        is_secondary: false,
        is_unanswered: false,
    }
}

/// Such a path with its window full.
fn busy(srtt: u32) -> Offer {
    Offer {
        budget: 0,
        in_flight: 100_000,
        ..offer(srtt)
    }
}

/// A flow that waits, whose sender has so many bytes under way.
fn flow(under_way: usize) -> Wanted {
    Wanted {
        under_way,
        ..Wanted::alone(Placement::Any, 10_000, Avoid::Nothing)
    }
}

fn picks(scheduler: Scheduler, under_way: usize, offers: &[Offer]) -> Pick {
    pick(scheduler, offers, &flow(under_way))
}

#[test]
fn of_paths_with_room_each_takes_by_its_own_order() {
    let offers = [
        Offer {
            turn: 3,
            delivery: MS,
            ..offer(30)
        },
        Offer {
            turn: 2,
            ..offer(10)
        },
        Offer {
            turn: 1,
            ..offer(20)
        },
    ];
    for (scheduler, at) in [
        (Scheduler::Balanced, 0),
        (Scheduler::Redundant, 0),
        (Scheduler::LowestRtt, 1),
        (Scheduler::Blest, 1),
        (Scheduler::RoundRobin, 2),
    ] {
        assert_eq!(
            picks(scheduler, 0, &offers),
            Pick::Take(at),
            "{scheduler:?}"
        );
    }
}

#[test]
fn none_is_taken_that_is_busy_and_without_room_all_wait() {
    for scheduler in Scheduler::ALL {
        let offers = [busy(1), busy(2)];
        assert_eq!(
            picks(scheduler, 1 << 30, &offers),
            Pick::Wait,
            "{scheduler:?}"
        );
        let offers = [busy(1), offer(2)];
        assert_eq!(
            picks(scheduler, 1 << 30, &offers),
            Pick::Take(1),
            "{scheduler:?}"
        );
    }
}

#[test]
fn a_secondary_path_comes_after_the_others_and_so_does_one_that_lost_the_same() {
    let last: [fn(&mut Offer); 2] = [|one| one.is_secondary = true, |one| one.is_avoided = true];
    for scheduler in Scheduler::ALL {
        for make_last in last {
            let mut quick = offer(10);
            make_last(&mut quick);
            let offers = [
                quick,
                Offer {
                    turn: 1,
                    ..offer(12)
                },
            ];
            assert_eq!(picks(scheduler, 0, &offers), Pick::Take(1), "{scheduler:?}");
            assert_eq!(
                picks(scheduler, 0, &offers[..1]),
                Pick::Take(0),
                "{scheduler:?}"
            );
        }
    }
}

#[test]
fn what_a_path_lost_goes_by_it_again_if_others_would_deliver_it_later_than_its_second_attempt() {
    let lost = Offer {
        is_avoided: true,
        ..offer(10)
    };
    for (other, is_unanswered, taken) in [(28, false, 1), (32, false, 0), (32, true, 1)] {
        let lost = Offer {
            is_unanswered,
            ..lost
        };
        let picked = picks(Scheduler::Balanced, 0, &[lost, offer(other)]);
        assert_eq!(picked, Pick::Take(taken), "{other} {is_unanswered}");
    }
}

#[test]
fn an_ample_trusted_path_has_a_head_start() {
    let ample = Offer {
        is_ample: true,
        delivery: MS / 2,
        ..offer(1)
    };
    let other = |micros| Offer {
        delivery: Duration::from_micros(micros),
        ..offer(1)
    };
    let balanced = |other| picks(Scheduler::Balanced, 0, &[ample, other]);
    assert_eq!(balanced(other(1)), Pick::Take(0));
    let slower = Offer {
        delivery: 2 * MS,
        ..ample
    };
    let picked = picks(Scheduler::Balanced, 0, &[slower, other(1)]);
    assert_eq!(picked, Pick::Take(1));
}

#[test]
fn a_slow_path_is_passed_over_unless_its_sender_keeps_the_quick_ones_busy() {
    // The slow one's acknowledgement is there after 100 ms, in which the quick one carries 1 MB.
    let offers = [busy(10), offer(100)];
    for (under_way, picked) in [(999_999, Pick::PassOver(1)), (1_000_000, Pick::Take(1))] {
        assert_eq!(picks(Scheduler::Balanced, under_way, &offers), picked);
    }
    // Of the quick one BLEST knows its window, 100 kB, which grows by nine datagrams in ten round trips.
    let needed = (100_000 + 9 * 1400 / 2) * 10 + 1400;
    for (under_way, picked) in [(needed - 1, Pick::PassOver(1)), (needed, Pick::Take(1))] {
        assert_eq!(picks(Scheduler::Blest, under_way, &offers), picked);
    }
    // The slower one is no reason to wait, but one that is not secondary is.
    let picked = |offers: &[Offer]| picks(Scheduler::Balanced, 0, offers);
    assert_eq!(picked(&[busy(100), offer(10)]), Pick::Take(1));
    let secondary = Offer {
        is_secondary: true,
        ..offer(10)
    };
    assert_eq!(picked(&[busy(100), secondary]), Pick::PassOver(1));
}
