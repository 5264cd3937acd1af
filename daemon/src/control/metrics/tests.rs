use dibs_control::{BackstopInfo, BumpInfo, Integrity, PeerInfo, Trust};

use super::*;

fn path(name: &str, state: PathState) -> PathInfo {
    PathInfo {
        name: name.to_owned(),
        peer: "ser\"ver".to_owned(),
        trust: Trust::Trusted,
        state,
        interface: None,
        remote: None,
        srtt_us: Some(1500),
        min_rtt_us: None,
        rttvar_us: None,
        loss: 0.25,
        lost: 3,
        marked: 1,
        bytes_sent: 2048,
        bytes_received: 7,
        mtu: 1452,
        cwnd: 65536,
        in_flight: 0,
        pacing_rate: None,
        gso: true,
        preferred: false,
        role: "primary".to_owned(),
        rate_limit: None,
        volume: None,
        volume_used: None,
        scheduler: "balanced".to_owned(),
        unused: None,
        reason: None,
    }
}

fn status(paths: Vec<PathInfo>) -> Status {
    Status {
        version: "0.1.0".to_owned(),
        pid: 9,
        uptime: 192,
        integrity: Integrity::On,
        warnings: vec!["scramble".to_owned()],
        peers: vec![PeerInfo {
            name: "ser\"ver".to_owned(),
            state: PeerState::Connecting,
            public_key: "key".to_owned(),
            addresses: Vec::new(),
            accept: Vec::new(),
            since: None,
            bytes_sent: 1,
            bytes_received: 2,
            connections: 1,
            keys: None,
            endpoints: Vec::new(),
            reason: None,
        }],
        paths,
        silent_ports: Vec::new(),
        bumps: vec![BumpInfo {
            name: "seal".to_owned(),
            kind: "seal".to_owned(),
            device: None,
            needed: None,
            shares: None,
            default: true,
            connections: 4,
            answers: None,
            reason: None,
        }],
        connections: 5,
        counters: [("datagram_replayed".to_owned(), 4)].into(),
        counted: None,
        backstop: BackstopInfo {
            state: BackstopState::Failed,
            reason: None,
        },
    }
}

#[test]
fn names_units_and_labels_are_as_conventions_ask() {
    let text = text(&status(vec![path("eth", PathState::Up)])).unwrap();
    for line in [
        "dibs_build_info{version=\"0.1.0\"} 1.0",
        "# UNIT dibs_uptime_seconds seconds",
        "dibs_uptime_seconds{} 192.0",
        "dibs_connections{} 5.0",
        "dibs_bump_connections{bump=\"seal\"} 4.0",
        "dibs_events_total{event=\"datagram_replayed\"} 4",
        "dibs_backstop_up{} 0.0",
        "dibs_peer_session_up{peer=\"ser\\\"ver\"} 0.0",
        "dibs_path_up{path=\"eth\",peer=\"ser\\\"ver\"} 1.0",
        "dibs_path_rtt_seconds{path=\"eth\",peer=\"ser\\\"ver\"} 0.0015",
        "dibs_path_loss_ratio{path=\"eth\",peer=\"ser\\\"ver\"} 0.25",
        "dibs_path_sent_bytes_total{path=\"eth\",peer=\"ser\\\"ver\"} 2048",
        "# TYPE dibs_path_lost_datagrams counter",
    ] {
        assert!(text.lines().any(|known| known == line), "{line}:\n{text}");
    }
    assert!(!text.contains("dibs_path_min_rtt_seconds{"), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
}

/// While a path moves, both of its ends are listed.
#[test]
fn each_series_stands_once() {
    let mut old = path("eth", PathState::Down);
    old.srtt_us = Some(9);
    let text = text(&status(vec![
        old.clone(),
        path("eth", PathState::Up),
        old,
        path("wlan", PathState::Down),
    ]))
    .unwrap();
    let mut series: Vec<&str> = { text.lines() }
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.rsplit_once(' ').map(|(name, _)| name))
        .collect();
    let all = series.len();
    series.sort_unstable();
    series.dedup();
    assert_eq!(series.len(), all, "{text}");
    let line = |line: &str| text.lines().any(|known| known == line);
    assert!(
        line("dibs_path_rtt_seconds{path=\"eth\",peer=\"ser\\\"ver\"} 0.0015"),
        "{text}"
    );
    assert!(
        line("dibs_path_sent_bytes_total{path=\"eth\",peer=\"ser\\\"ver\"} 6144"),
        "{text}"
    );
}
