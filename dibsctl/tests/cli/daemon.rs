//! A daemon that answers as it is told, and what it has to tell.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;

use dibs_control::{
    BackstopInfo, BackstopState, BumpInfo, Changed, ConnInfo, ConnPathInfo, EndpointInfo, Failure,
    Integrity, KeyOrigin, PathInfo, PathState, PathUsage, PeerInfo, PeerState, Preferences,
    Preferred, Reply, Request, RuleInfo, RuleOrigin, Skipped, Status, Trust, decode_request,
    encode_reply,
};
use tempfile::TempDir;

use crate::{Run, dibsctl};

/// Serves one connection.
pub(crate) struct Daemon {
    dir: TempDir,
    thread: JoinHandle<Request>,
}

impl Daemon {
    /// Reads one request, lets `serve` answer it, and closes.
    pub(crate) fn serving(serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("sock")).unwrap();
        let thread = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            serve(stream);
            decode_request(&line).unwrap()
        });
        Daemon { dir, thread }
    }

    pub(crate) fn saying(text: impl Into<String>) -> Self {
        let text = text.into();
        Daemon::serving(move |mut stream| stream.write_all(text.as_bytes()).unwrap())
    }

    pub(crate) fn answering(answer: Result<Reply, Failure>) -> Self {
        Daemon::saying(encode_reply(&answer))
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    /// Runs `dibsctl --socket ... args`; what it did, and what it asked for.
    pub(crate) fn run(self, args: &[&str]) -> (Run, Request) {
        let socket = self.socket();
        let mut command = dibsctl(&["--socket", socket.to_str().unwrap()]);
        let run = Run::of(command.args(args).output().unwrap());
        (run, self.request())
    }

    pub(crate) fn request(self) -> Request {
        self.thread.join().unwrap()
    }
}

pub(crate) fn conn() -> ConnInfo {
    let path = |name: &str, bytes_sent| ConnPathInfo {
        name: name.to_owned(),
        bytes_sent,
        bytes_received: 0,
    };
    ConnInfo {
        id: 7,
        peer: "server".to_owned(),
        local: "10.0.1.1:40000".parse().unwrap(),
        remote: "10.0.1.2:80".parse().unwrap(),
        local_there: None,
        remote_there: None,
        plain: None,
        bump: "scramble".to_owned(),
        process: Some("curl\u{1b}[2J".to_owned()),
        pid: Some(42),
        uid: Some(1000),
        mptcp: None,
        since: 0.0,
        bytes_sent: 3 << 20,
        bytes_received: 1536,
        retransmissions: 2,
        paths: vec![path("eth", 1 << 20), path("wlan", 2 << 20)],
        reason: None,
    }
}

pub(crate) fn path() -> PathInfo {
    PathInfo {
        name: "eth".to_owned(),
        peer: "server".to_owned(),
        trust: Trust::Trusted,
        state: PathState::Up,
        interface: None,
        remote: Some("10.0.1.2:5300".parse().unwrap()),
        srtt_us: Some(1500),
        min_rtt_us: Some(900),
        rttvar_us: Some(10),
        loss: 0.001,
        lost: 3,
        marked: 0,
        bytes_sent: 2048,
        bytes_received: 0,
        mtu: 1452,
        cwnd: 65536,
        in_flight: 0,
        pacing_rate: None,
        gso: true,
        preferred: true,
        role: "primary".to_owned(),
        rate_limit: None,
        volume: None,
        volume_used: None,
        scheduler: "balanced".to_owned(),
        unused: None,
        reason: Some("carries all of the trusted share".to_owned()),
    }
}

/// With `wlan` preferred.
pub(crate) fn preferences() -> Preferences {
    let usage = |name: &str, role: &str, rate_limit, volume| PathUsage {
        name: name.to_owned(),
        role: role.to_owned(),
        rate_limit,
        volume,
    };
    Preferences {
        scheduler: "lowest-rtt".to_owned(),
        prefer: Some(Preferred {
            path: "wlan".to_owned(),
            weight: 100,
            delta: 2.5,
        }),
        paths: vec![
            usage("eth", "primary", None, None),
            usage("wlan", "backup", Some(20_000_000), Some(10_000_000_000)),
        ],
        changed: true,
        warnings: Vec::new(),
    }
}

pub(crate) fn peer() -> PeerInfo {
    PeerInfo {
        name: "server".to_owned(),
        state: PeerState::Established,
        public_key: "key".to_owned(),
        addresses: vec!["10.0.1.2/32".parse().unwrap()],
        accept: vec!["paths".to_owned()],
        since: Some(0.0),
        bytes_sent: 1,
        bytes_received: 2,
        connections: 1,
        keys: Some(KeyOrigin::Chained),
        endpoints: vec![EndpointInfo {
            path: "eth".to_owned(),
            endpoint: "home.example.net:5300".to_owned(),
            addresses: vec!["10.0.1.2:5300".parse().unwrap()],
            fault: None,
        }],
        reason: None,
    }
}

pub(crate) fn bump() -> BumpInfo {
    BumpInfo {
        name: "scramble".to_owned(),
        kind: "scramble".to_owned(),
        device: None,
        needed: None,
        shares: None,
        default: true,
        connections: 1,
        answers: None,
        reason: None,
    }
}

pub(crate) fn rule() -> RuleInfo {
    RuleInfo {
        id: 3,
        bump: "scramble".to_owned(),
        require: false,
        prefer: false,
        priority: 0,
        active: true,
        origin: RuleOrigin::User,
        selector: [("dport".to_owned(), "80".to_owned())].into(),
        scheduler: None,
        note: None,
    }
}

pub(crate) fn changed() -> Changed {
    Changed {
        bump: "scramble".to_owned(),
        connections: vec![conn()],
        skipped: vec![Skipped {
            id: 8,
            local: "10.0.1.1:40001".parse().unwrap(),
            remote: "10.0.1.2:80".parse().unwrap(),
            reason: "its socket is bound to a device".to_owned(),
        }],
        warnings: vec!["scramble: text can be recovered".to_owned()],
    }
}

pub(crate) fn status() -> Status {
    Status {
        version: "0.1.0".to_owned(),
        pid: 99,
        uptime: 192,
        integrity: Integrity::On,
        warnings: vec!["integrity is a fine thing".to_owned()],
        peers: vec![peer()],
        paths: vec![path()],
        silent_ports: Vec::new(),
        bumps: vec![bump()],
        connections: 5,
        counters: [("replayed".to_owned(), 4), ("silent".to_owned(), 0)].into(),
        backstop: BackstopInfo {
            state: BackstopState::Failed,
            reason: Some("set up the table: no".to_owned()),
        },
        counted: Some(1.5),
    }
}
