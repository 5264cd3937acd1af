//! A host with a TUN and a peer beside it, each in a network namespace of its own.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;

use dibs_netns::{HANG, Host};
use dibs_policy::{
    BumpRoute, ClassRule, Desired, DeviceName, DeviceOwner, Error, MarkLayout, Report, Steering,
    Variant,
};
use dibs_settings::BumpId;
use ipnet::IpNet;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Protocol, Socket, Type};
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::packet::Packet;

/// Both ends' addresses, IPv4 and IPv6.
pub(crate) const ENDS: [(&str, &str); 2] = [("10.7.1.1", "10.7.1.2"), ("fd07:1::1", "fd07:1::2")];

/// Network that holds one address.
pub(crate) fn net_of(address: &str) -> IpNet {
    IpNet::from(address.parse::<IpAddr>().expect("an address"))
}

/// Runs a test on this process's own network.
pub(crate) fn run(variant: Variant, test: fn(&Lab)) -> anyhow::Result<()> {
    test(&Lab::new(variant)?);
    Ok(())
}

/// The host that this process is, its TUN `dibs1`, and its peer, joined by `veth0`.
pub(crate) struct Lab {
    pub(crate) variant: Variant,
    tun: SyncDevice,
    peer: Host,
    runtime: tokio::runtime::Runtime,
}

pub(crate) fn bump(id: u8) -> BumpId {
    BumpId::new(id).expect("a bump's id")
}

pub(crate) fn marks() -> MarkLayout {
    MarkLayout::default()
}

/// One bump by `dibs1` to the peer, which new connections to port 80 take.
pub(crate) fn wish() -> Desired {
    let route = BumpRoute {
        id: bump(1),
        device: DeviceName::new("dibs1").expect("a name"),
        owner: DeviceOwner::Ours,
        addresses: ENDS
            .iter()
            .map(|(here, _)| here.parse().expect("an address"))
            .collect(),
        peers: ENDS.iter().map(|(_, there)| net_of(there)).collect(),
    };
    let rule = ClassRule {
        dport: Some(80.into()),
        ..ClassRule::tcp(1, bump(1))
    };
    Desired {
        bumps: vec![route],
        rules: vec![rule],
        ..Desired::default()
    }
}

pub(crate) fn address(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse::<IpAddr>().expect("an address"), port)
}

impl Lab {
    fn new(variant: Variant) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let tun = DeviceBuilder::new()
            .name("dibs1")
            .enable(false)
            .build_sync()?;
        tun.set_nonblocking(true)?;
        let lab = Self {
            variant,
            tun,
            peer: Host::new("peer")?,
            runtime,
        };
        lab.sh("ip link set lo up");
        lab.sh("ip link add veth0 type veth peer name veth0 netns peer");
        lab.up("veth0", 1);
        lab.peer.in_ns(|| lab.up("veth0", 2));
        Ok(lab)
    }

    fn up(&self, device: &str, last: u8) {
        self.sh(&format!("ip link set {device} addrgenmode none"));
        self.sh(&format!("ip link set {device} up"));
        self.sh(&format!("ip addr add 10.7.1.{last}/24 dev {device}"));
        self.sh(&format!("ip addr add fd07:1::{last}/64 dev {device} nodad"));
    }

    /// Runs a command on this host, which must succeed; what it printed.
    pub(crate) fn sh(&self, command: &str) -> String {
        let output = Command::new("sh")
            .args(["-c", command])
            .output()
            .expect("sh runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command}: {error}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs `iptables` or `ip6tables` of this lab's variant.
    pub(crate) fn iptables(&self, program: &str, arguments: &str) -> String {
        self.sh(&format!("{} -w {arguments}", self.program(program)))
    }

    pub(crate) fn program(&self, name: &str) -> String {
        let suffix = if self.variant == Variant::Legacy {
            "legacy"
        } else {
            "nft"
        };
        format!("{name}-{suffix}")
    }

    /// Everything that steering may touch, as other programs print it.
    pub(crate) fn state(&self) -> String {
        let save = |family: &str| {
            let saved = self.sh(&format!("{}-save", self.program(family)));
            let plain = |line: &&str| !line.starts_with('#');
            let without_counters = |line: &str| line.split(" [").next().unwrap_or(line).to_owned();
            let lines: Vec<_> = saved.lines().filter(plain).map(without_counters).collect();
            lines.join("\n")
        };
        let net = self.sh(
            "ip rule; ip -6 rule; ip route show table all; ip -6 route show table all; ip -o addr show dev dibs1",
        );
        format!("{}\n{}\n{net}", save("iptables"), save("ip6tables"))
    }

    pub(crate) fn steering(&self) -> Steering {
        let _context = self.runtime.enter();
        Steering::system(Some(self.variant)).expect("netlink")
    }

    pub(crate) fn set(&self, steering: &mut Steering, desired: &Desired) -> Report {
        self.wait(steering.set(desired))
            .unwrap_or_else(|error: Error| panic!("set: {error}"))
    }

    /// A steering that has brought this host to `desired`.
    pub(crate) fn steered(&self, desired: &Desired) -> Steering {
        let mut steering = self.steering();
        let report = self.set(&mut steering, desired);
        assert_eq!(report.warnings, [""; 0]);
        steering
    }

    pub(crate) fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        let bounded = async { tokio::time::timeout(HANG, future).await };
        self.runtime.block_on(bounded).expect("it ends in time")
    }

    /// Runs `make` with the runtime at hand, for what opens sockets.
    pub(crate) fn open<T>(&self, make: impl FnOnce() -> Result<T, Error>) -> T {
        let _context = self.runtime.enter();
        make().unwrap_or_else(|error| panic!("{error}"))
    }

    /// The next TCP, UDP or ICMP error packet that the TUN takes from the kernel.
    pub(crate) fn tun_takes(&self) -> Packet {
        let mut buffer = vec![0; 65535];
        loop {
            wait_for(&self.tun, PollFlags::POLLIN, "a packet from the TUN");
            let length = self.tun.recv(&mut buffer).expect("the TUN is up");
            if let Some(packet) = Packet::parse(&buffer[..length]) {
                return packet;
            }
        }
    }

    /// The next payload that the TUN takes: acknowledgements and ends of connections are passed over.
    pub(crate) fn tun_takes_data(&self) -> Vec<u8> {
        loop {
            let packet = self.tun_takes();
            if !packet.payload.is_empty() {
                return packet.payload;
            }
        }
    }

    pub(crate) fn tun_gives(&self, packet: &[u8]) {
        assert_eq!(self.tun.send(packet).expect("the TUN is up"), packet.len());
    }

    /// Runs `work` on the peer. Sockets made there stay there.
    pub(crate) fn on_peer<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.peer.in_ns(work)
    }

    pub(crate) fn peer_listens(&self, port: u16, ip: &str) -> TcpListener {
        let listener = self.on_peer(|| TcpListener::bind(address(ip, port)).expect("a listener"));
        listener.set_nonblocking(true).expect("nonblocking");
        listener
    }

    /// An established connection to the peer, and its far end. What is written goes at once, also while what the TUN
    /// took is never acknowledged (Nagle's algorithm).
    pub(crate) fn connected(&self, port: u16, ip: &str) -> (TcpStream, TcpStream) {
        let listener = self.peer_listens(port, ip);
        let near = TcpStream::connect(address(ip, port)).expect("a connection");
        near.set_nodelay(true).expect("no delay");
        (near, accept(&listener))
    }
}

pub(crate) fn accept(listener: &TcpListener) -> TcpStream {
    wait_for(listener, PollFlags::POLLIN, "a connection");
    listener.accept().expect("a connection").0
}

/// A socket that has begun to connect.
pub(crate) fn connecting(to: SocketAddr, device: Option<&str>) -> Socket {
    let socket =
        Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP)).expect("socket");
    socket
        .bind_device(device.map(str::as_bytes))
        .expect("a device");
    socket.set_nonblocking(true).expect("nonblocking");
    let begun = socket
        .connect(&to.into())
        .map_err(|error| error.raw_os_error());
    assert!(matches!(begun, Err(Some(libc::EINPROGRESS))), "{begun:?}");
    socket
}

/// Waits until `what` is ready; `name` says what did not come.
pub(crate) fn wait_for(what: &impl AsFd, events: PollFlags, name: &str) {
    let timeout = PollTimeout::try_from(HANG).expect("some minutes");
    let ready = poll(&mut [PollFd::new(what.as_fd(), events)], timeout).expect("poll");
    assert!(ready > 0, "{name} did not come");
}
