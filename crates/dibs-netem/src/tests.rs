use super::*;

const MS: Duration = Duration::from_millis(1);

fn fates(seed: u64, conditions: &Conditions, packets: u32) -> Vec<Fate> {
    let mut link = Emulator::new(seed);
    (0..packets)
        .map(|n| link.enter(conditions, n * MS / 10, 1500))
        .collect()
}

fn delivery(fate: Fate) -> Delivery {
    match fate {
        Fate::Delivered(delivery) => delivery,
        Fate::Dropped(cause) => panic!("dropped: {cause:?}"),
    }
}

fn share(fates: &[Fate], which: impl Fn(&Fate) -> bool) -> f64 {
    fates.iter().filter(|fate| which(fate)).count() as f64 / fates.len() as f64
}

#[test]
fn a_perfect_link_delivers_at_once() {
    for (n, fate) in fates(1, &Conditions::new(), 100).into_iter().enumerate() {
        let expected = Delivery {
            at: n as u32 * MS / 10,
            duplicate: false,
            late: false,
            corrupt: None,
        };
        assert_eq!(delivery(fate), expected);
    }
}

#[test]
fn the_same_seed_decides_the_same() {
    let conditions = Conditions::new()
        .rate(200_000_000)
        .delay(5 * MS)
        .jitter(2 * MS)
        .loss(0.1)
        .reorder(0.1, MS)
        .duplicate(0.1)
        .corrupt(0.1);
    assert_eq!(fates(7, &conditions, 2000), fates(7, &conditions, 2000));
    assert_ne!(fates(7, &conditions, 2000), fates(8, &conditions, 2000));
}

#[test]
fn a_change_of_one_condition_leaves_the_others_dice_alone() {
    let corrupt = |conditions: Conditions| -> Vec<usize> {
        let fates = fates(3, &conditions.corrupt(0.05), 5000);
        let flipped = |fate: &Fate| matches!(fate, Fate::Delivered(d) if d.corrupt.is_some());
        (0..fates.len()).filter(|&n| flipped(&fates[n])).collect()
    };
    let alone = corrupt(Conditions::new());
    assert!(alone.len() > 150);
    assert_eq!(
        alone,
        corrupt(Conditions::new().jitter(MS).duplicate(0.5).reorder(0.5, MS))
    );
}

#[test]
fn probabilities_are_met() {
    let conditions = Conditions::new()
        .loss(0.1)
        .reorder(0.2, MS)
        .duplicate(0.05)
        .corrupt(0.02)
        .delay(MS);
    let fates = fates(11, &conditions, 200_000);
    let close = |got: f64, wanted: f64| assert!((got - wanted).abs() < 0.005, "{got} {wanted}");
    close(
        share(&fates, |fate| *fate == Fate::Dropped(Cause::Loss)),
        0.1,
    );
    let delivered: Vec<Fate> = fates
        .into_iter()
        .filter(|fate| matches!(fate, Fate::Delivered(_)))
        .collect();
    close(share(&delivered, |&fate| delivery(fate).late), 0.2);
    close(share(&delivered, |&fate| delivery(fate).duplicate), 0.05);
    close(
        share(&delivered, |&fate| delivery(fate).corrupt.is_some()),
        0.02,
    );
}

#[test]
fn the_rate_spaces_packets_and_the_queue_is_bounded() {
    // 1500 bytes at 12 Mbit/s take a millisecond; three fit the queue.
    let conditions = Conditions::new().rate(12_000_000).queue(4500);
    let mut link = Emulator::new(1);
    let fates: Vec<Fate> = (0..5).map(|_| link.enter(&conditions, MS, 1500)).collect();
    let arrivals: Vec<Duration> = fates[..3].iter().map(|&fate| delivery(fate).at).collect();
    assert_eq!(arrivals, [2 * MS, 3 * MS, 4 * MS]);
    assert_eq!(fates[3..], [Fate::Dropped(Cause::Queue); 2]);
    // A place is free once the first is sent, and an idle link sends at once.
    assert_eq!(delivery(link.enter(&conditions, 2 * MS, 1500)).at, 5 * MS);
    assert_eq!(delivery(link.enter(&conditions, 50 * MS, 1500)).at, 51 * MS);
}

#[test]
fn a_packet_larger_than_the_queue_passes_an_idle_link() {
    let conditions = Conditions::new().rate(12_000_000).queue(100);
    let fate = Emulator::new(1).enter(&conditions, Duration::ZERO, 1500);
    assert_eq!(delivery(fate).at, MS);
}

#[test]
fn jitter_varies_the_delay_and_keeps_the_order() {
    let conditions = Conditions::new().delay(10 * MS).jitter(4 * MS);
    let mut link = Emulator::new(5);
    let mut previous = Duration::ZERO;
    let (mut least, mut most) = (Duration::MAX, Duration::ZERO);
    for n in 0..2000 {
        let now = n * 10 * MS;
        let at = delivery(link.enter(&conditions, now, 100)).at;
        assert!(at >= previous);
        previous = at;
        least = least.min(at - now);
        most = most.max(at - now);
    }
    assert!(least >= 6 * MS && least < 7 * MS, "{least:?}");
    assert!(most <= 14 * MS && most > 13 * MS, "{most:?}");
    // Close together, they queue behind the slowest rather than overtake it.
    let arrivals: Vec<Duration> = (0..1000)
        .map(|n| delivery(link.enter(&conditions, (n + 30_000) * MS, 100)).at)
        .collect();
    assert!(arrivals.is_sorted());
}

#[test]
fn only_reordering_lets_packets_overtake() {
    let conditions = Conditions::new().reorder(0.1, 5 * MS);
    let mut link = Emulator::new(5);
    let arrivals: Vec<Duration> = (0..1000)
        .map(|n| delivery(link.enter(&conditions, n * MS, 100)).at)
        .collect();
    let overtaken = arrivals.windows(2).filter(|pair| pair[1] < pair[0]).count();
    assert!((50..=120).contains(&overtaken), "{overtaken}");
}

#[test]
fn outages_drop_what_enters() {
    let conditions = Conditions::new().outage(10 * MS..20 * MS);
    let mut link = Emulator::new(1);
    for n in 0..30 {
        let fate = link.enter(&conditions, n * MS, 100);
        assert_eq!(
            fate == Fate::Dropped(Cause::Outage),
            (10..20).contains(&n),
            "{n}"
        );
    }
    let now = Conditions {
        outage: true,
        ..Conditions::new()
    };
    assert_eq!(link.enter(&now, 40 * MS, 100), Fate::Dropped(Cause::Outage));
}

#[test]
fn lost_packets_take_their_time_on_the_wire() {
    let conditions = Conditions::new().rate(12_000_000).loss(1.0);
    let mut link = Emulator::new(1);
    assert_eq!(
        link.enter(&conditions, Duration::ZERO, 1500),
        Fate::Dropped(Cause::Loss)
    );
    let healed = Conditions::new().rate(12_000_000);
    assert_eq!(
        delivery(link.enter(&healed, Duration::ZERO, 1500)).at,
        2 * MS
    );
}
