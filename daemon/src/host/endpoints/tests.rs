//! Names are answered by hand, and the data path is looked over the shoulder.

use super::*;
use crate::host::interfaces::Interface;

const CONFIG: &str = "[[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n\
    [[path]]\nname = \"lte\"\ninterface = \"lte0\"\ntrust = \"untrusted\"\n\
    [[peer]]\nname = \"b\"\npublic_key = \"hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=\"\n\
    addresses = [\"10.0.1.2/32\"]\n\
    [peer.endpoints]\neth = \"home.example.net:5300\"\nlte = \"10.0.2.2:5301\"\n";

fn config() -> Config {
    dibs_config::parse("file", CONFIG).unwrap()
}

/// A host whose trusted interface has these addresses.
fn inventory(addresses: &[&str]) -> Inventory {
    let interface = |name: &str, addresses: &[&str]| Interface {
        index: 1,
        name: name.to_owned(),
        altnames: Vec::new(),
        up: true,
        mtu: 1500,
        addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
    };
    Inventory::of(vec![
        interface("eth0", addresses),
        interface("lte0", &["10.0.2.1"]),
    ])
}

fn answer(addresses: &[&str]) -> Result<Vec<IpAddr>, String> {
    Ok(addresses.iter().map(|text| text.parse().unwrap()).collect())
}

/// The one name is due, and the resolver says this.
fn look_up(endpoints: &Endpoints, now: Instant, answer: Result<Vec<IpAddr>, String>) {
    let lookup = endpoints.poll_lookup(now).expect("it is due");
    assert_eq!(
        (lookup.host.as_str(), lookup.port),
        ("home.example.net", 5300)
    );
    assert!(endpoints.poll_lookup(now).is_none(), "once at a time");
    endpoints.note_answer(now, lookup.number, answer);
}

/// Addresses to which the trusted path leads, as the user is shown them, and the fault of their name.
fn shown(endpoints: &Endpoints, inventory: &Inventory) -> (Vec<String>, Option<String>) {
    let infos = endpoints.infos(&config(), inventory, 0);
    assert_eq!(infos[1].addresses, ["10.0.2.2:5301".parse().unwrap()]);
    assert_eq!(infos[1].fault, None);
    let addresses = infos[0].addresses.iter().map(ToString::to_string).collect();
    (addresses, infos[0].fault.clone())
}

#[test]
fn both_ip_versions_are_used_as_far_as_the_path_has_them() {
    let (now, endpoints) = (Instant::now(), Endpoints::of(&config()));
    let both = inventory(&["10.0.1.1", "fe80::1", "fd00::1"]);
    let (at, fault) = shown(&endpoints, &both);
    assert!(at.is_empty() && fault.unwrap().contains("is being resolved"));
    look_up(
        &endpoints,
        now,
        answer(&["fd00::2", "10.0.1.2", "0.0.0.0", "::ffff:10.0.1.2"]),
    );
    let is = |inventory: &Inventory| shown(&endpoints, inventory);
    let v4 = vec!["10.0.1.2:5300".to_owned()];
    assert_eq!(
        is(&both),
        (["[fd00::2]:5300".to_owned(), v4[0].clone()].into(), None)
    );
    // What every interface has leads to no other network.
    assert_eq!(is(&inventory(&["10.0.1.1", "fe80::1"])), (v4, None));
    assert_eq!(is(&inventory(&[])).0.len(), 2, "nobody knows yet");

    endpoints.note_network();
    look_up(&endpoints, now, answer(&["fd00::2"]));
    let (at, fault) = is(&inventory(&["10.0.1.1"]));
    assert!(at.is_empty());
    assert_eq!(
        fault.unwrap(),
        "the name home.example.net has IPv6 addresses alone, and path eth has IPv4 addresses alone"
    );
}

#[test]
fn what_was_found_holds_while_the_resolver_is_away() {
    let (now, endpoints) = (Instant::now(), Endpoints::of(&config()));
    let host = inventory(&["10.0.1.1"]);
    look_up(&endpoints, now, answer(&["10.0.1.2"]));
    endpoints.note_network();
    look_up(&endpoints, now, Err("no answer".to_owned()));
    let (at, fault) = shown(&endpoints, &host);
    assert_eq!(at, ["10.0.1.2:5300"]);
    assert_eq!(
        fault.unwrap(),
        "the name home.example.net cannot be resolved: no answer"
    );
    assert_eq!(endpoints.faults(&config(), &host).len(), 1);
    // It is asked again, though the peer answers.
    endpoints.note_silence(now, |_, _| false);
    assert!(endpoints.due(now).is_some());
    endpoints.note_network();
    look_up(&endpoints, now, answer(&["10.0.1.3"]));
    assert_eq!(
        shown(&endpoints, &host),
        (vec!["10.0.1.3:5300".to_owned()], None)
    );
    endpoints.note_silence(now, |_, _| false);
    assert_eq!(endpoints.due(now), None);
}

#[test]
fn a_name_of_many_addresses_is_not_called_at_all_of_them() {
    let many: Vec<IpAddr> = (1..=20).map(|n| IpAddr::from([10, 0, 1, n])).collect();
    let v6: IpAddr = "fd00::2".parse().unwrap();
    let kept = some_of_each(many.iter().copied().chain([v6]).collect());
    assert_eq!(kept, [&many[..ADDRESSES], &[v6]].concat());
    let reversed: Vec<IpAddr> = kept.iter().rev().copied().collect();
    assert!(is_same(&kept, &reversed) && !is_same(&kept, &kept[1..]));
}

/// Looks up whenever it is due from a second on until another; the seconds at which it did.
fn lookups(schedule: &mut Schedule, zero: Instant, seconds: std::ops::Range<u64>) -> Vec<u64> {
    let mut at = Vec::new();
    for second in seconds {
        let now = zero + Duration::from_secs(second);
        if schedule.due(now).is_some_and(|due| due <= now) {
            schedule.begin();
            assert_eq!(schedule.due(now), None, "one lookup at a time");
            schedule.end(now);
            at.push(second);
        }
    }
    at
}

#[test]
fn a_name_is_looked_up_at_first_and_while_nobody_answers() {
    let zero = Instant::now();
    let mut schedule = Schedule::new();
    schedule.note_silence(zero, true);
    assert_eq!(
        lookups(&mut schedule, zero, 0..240),
        [0, 10, 30, 70, 130, 190]
    );
    let answers = zero + Duration::from_secs(240);
    schedule.note_silence(answers, false);
    assert!(lookups(&mut schedule, zero, 240..1000).is_empty());
    schedule.note_silence(zero + Duration::from_secs(1000), true);
    assert_eq!(lookups(&mut schedule, zero, 1000..1040), [1010, 1030]);
}

#[test]
fn a_change_of_the_network_is_asked_about_at_once() {
    let zero = Instant::now();
    let mut schedule = Schedule::new();
    schedule.note_silence(zero, true);
    lookups(&mut schedule, zero, 0..100);
    schedule.note_network();
    assert_eq!(lookups(&mut schedule, zero, 100..140), [100, 110, 130]);
    schedule.note_silence(zero, false);
    schedule.note_network();
    assert_eq!(lookups(&mut schedule, zero, 140..400), [140]);
}
