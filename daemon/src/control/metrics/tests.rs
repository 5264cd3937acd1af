//! Tests of metrics.

use dibs_control::{BackstopInfo, BumpInfo, Integrity, PeerInfo, Trust};
use tokio::task::LocalSet;

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

/// Longer than anything takes on a busy machine.
const LONG: Duration = Duration::from_secs(1000);

/// Counts how often it is asked.
#[derive(Default)]
struct Counting(Rc<Cell<u32>>);

impl Collects for Counting {
    async fn collect(&self) -> Answer {
        self.0.set(self.0.get() + 1);
        // Others come meanwhile.
        yield_now().await;
        Answer::metrics(format!("asked {}\n", self.0.get()))
    }
}

/// A server with these limits, and how often it has collected.
fn serving(limits: Limits, test: impl AsyncFnOnce(std::net::SocketAddr, Rc<Cell<u32>>)) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    LocalSet::new().block_on(&runtime, async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let count = Rc::new(Cell::new(0));
        let server = Rc::new(Server::new(Counting(Rc::clone(&count)), limits));
        tokio::task::spawn_local(server.serve(listener));
        test(address, count).await;
    });
}

async fn scrape(address: std::net::SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

const LIMITS: Limits = Limits {
    fresh: LONG,
    request: LONG,
    answer: LONG,
};

#[test]
fn all_who_ask_within_a_time_share_one_collection() {
    serving(LIMITS, async |address, count| {
        let together = futures_util::future::join_all((0..CLIENTS).map(|_| scrape(address)));
        for answer in together.await.into_iter().chain([scrape(address).await]) {
            assert!(answer.ends_with("\r\n\r\nasked 1\n"), "{answer}");
        }
        assert_eq!(count.get(), 1);
    });
    let limits = Limits {
        fresh: Duration::ZERO,
        ..LIMITS
    };
    serving(limits, async |address, count| {
        scrape(address).await;
        scrape(address).await;
        assert_eq!(count.get(), 2);
    });
}

/// As many as there is room for, and more.
#[test]
fn clients_that_say_nothing_keep_nobody_out() {
    serving(LIMITS, async |address, _| {
        let mut silent = Vec::new();
        for _ in 0..2 * CLIENTS {
            silent.push(TcpStream::connect(address).await.unwrap());
            let answer = scrape(address).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        }
        // The oldest was let go, the latest was not.
        assert_eq!(silent[0].read(&mut [0]).await.unwrap(), 0);
        let last = silent.last_mut().unwrap();
        last.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        last.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    });
}

#[test]
fn a_client_that_says_nothing_is_let_go() {
    let limits = Limits {
        request: Duration::from_millis(20),
        ..LIMITS
    };
    serving(limits, async |address, _| {
        let mut silent = TcpStream::connect(address).await.unwrap();
        silent.write_all(b"GET /metrics").await.unwrap();
        assert_eq!(silent.read(&mut [0]).await.unwrap(), 0);
    });
}

#[test]
fn requests_are_told_apart() {
    for (request, expected) in [
        ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Asked::Metrics),
        ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", Asked::Metrics),
        ("GET / HTTP/1.1\r\n\r\n", Asked::Elsewhere),
        ("POST /metrics HTTP/1.1\r\n\r\n", Asked::Otherwise),
        ("GET /metrics HTTP/2\r\n\r\n", Asked::Nonsense),
        ("GET /metrics", Asked::Nonsense),
        ("", Asked::Nonsense),
        ("\u{16}\u{3}\u{1}", Asked::Nonsense),
    ] {
        assert_eq!(asked(request.as_bytes()), expected, "{request:?}");
    }
    assert_eq!(asked(b"\xff\xfe /metrics HTTP/1.1\r\n"), Asked::Nonsense);
}
