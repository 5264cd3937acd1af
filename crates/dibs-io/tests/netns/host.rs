//! Hosts: network namespaces that exist as long as their value does.

use nix::sched::{CloneFlags, setns, unshare};
use std::fs::{self, File};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

/// Enters a user namespace in which we are root; before any thread is started.
pub(crate) fn enter_user_namespace() {
    let (uid, gid) = (nix::unistd::getuid(), nix::unistd::getgid());
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)
        .expect("these tests need user namespaces (sysctl kernel.unprivileged_userns_clone)");
    fs::write("/proc/self/setgroups", "deny").expect("setgroups");
    fs::write("/proc/self/uid_map", format!("0 {uid} 1")).expect("uid_map");
    fs::write("/proc/self/gid_map", format!("0 {gid} 1")).expect("gid_map");
}

/// A network namespace, held by a thread that is parked in it.
pub(crate) struct Host {
    namespace: File,
    /// Names the namespace to `ip link ... netns`.
    thread_id: i32,
    end: Option<Sender<()>>,
    keeper: Option<JoinHandle<()>>,
}

impl Host {
    /// A namespace of its own with the loopback up.
    pub(crate) fn new() -> Self {
        let (end, wait): (_, Receiver<()>) = channel();
        let (tell, told) = channel();
        let keeper = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("unshare");
            let namespace = File::open("/proc/thread-self/ns/net").expect("namespace");
            tell.send((namespace, nix::unistd::gettid().as_raw()))
                .expect("the maker waits");
            _ = wait.recv();
        });
        let (namespace, thread_id) = told.recv().expect("the keeper tells");
        let host = Self {
            namespace,
            thread_id,
            end: Some(end),
            keeper: Some(keeper),
        };
        host.ip("link set lo up");
        host
    }

    /// Runs `work` in the namespace. Sockets and devices made there stay there.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let joined = thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(&self.namespace, CloneFlags::CLONE_NEWNET).expect("setns");
                    work()
                })
                .join()
        });
        joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// `ip` with these arguments.
    pub(crate) fn ip(&self, arguments: &str) -> String {
        self.command("ip", arguments)
    }

    /// A command in the namespace, which must succeed; returns what it printed.
    pub(crate) fn command(&self, program: &str, arguments: &str) -> String {
        let output = self.run(|| {
            Command::new(program)
                .args(arguments.split_whitespace())
                .output()
                .expect("it runs")
        });
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments}: {error}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Joins two hosts by a veth pair: `name` with address .1/64 or /24 here, .2 there.
    pub(crate) fn link(&self, peer: &Host, name: &str, subnet: u8) {
        let id = peer.thread_id;
        self.ip(&format!(
            "link add {name} type veth peer name {name} netns {id}"
        ));
        for host in [self, peer] {
            host.ip(&format!("link set {name} addrgenmode none"));
            host.ip(&format!("link set {name} up"));
        }
        for (host, last) in [(self, 1), (peer, 2)] {
            host.ip(&format!("addr add 10.0.{subnet}.{last}/24 dev {name}"));
            host.ip(&format!(
                "addr add fd00:{subnet}::{last}/64 dev {name} nodad"
            ));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(keeper) = self.keeper.take() {
            _ = keeper.join();
        }
    }
}
