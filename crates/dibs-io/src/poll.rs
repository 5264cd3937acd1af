//! Waiting for descriptors, for other threads, and for a deadline in nanoseconds.
//!
//! By hand because mio waits in whole milliseconds, and a pacer lets data go each few microseconds.

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Events taken per wait; further ones are reported by the next.
const EVENTS: usize = 32;

/// Event to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Something to read.
    Read,
    /// Something to read, or room to write.
    ReadWrite,
}

impl Interest {
    fn flags(self) -> EpollFlags {
        match self {
            Self::Read => EpollFlags::EPOLLIN,
            Self::ReadWrite => EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT,
        }
    }
}

/// A descriptor that is ready, named by its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// As given to [`Poller::add`] or [`Poller::waker`].
    pub token: u64,
    /// A read will not block. Errors and hang-ups count, so that the read reports them.
    pub readable: bool,
    /// A write will not block.
    pub writable: bool,
}

/// A level-triggered epoll set.
pub struct Poller {
    epoll: Epoll,
    events: [EpollEvent; EVENTS],
    ready: usize,
}

impl Poller {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self {
            epoll,
            events: [EpollEvent::empty(); EVENTS],
            ready: 0,
        })
    }

    /// Watches `fd` under the name `token`. Closing the descriptor ends it.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(self
            .epoll
            .add(fd, EpollEvent::new(interest.flags(), token))?)
    }

    /// Changes token and interest of a watched `fd`.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(self
            .epoll
            .modify(fd, &mut EpollEvent::new(interest.flags(), token))?)
    }

    /// Watches `fd` no longer.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(self.epoll.delete(fd)?)
    }

    /// A handle by which other threads end a wait; that is reported under `token`, once however
    /// often it was woken meanwhile.
    pub fn waker(&self, token: u64) -> io::Result<Waker> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event = Arc::new(EventFd::from_flags(flags)?);
        // Edge-triggered: every write is an event, and the counter need not be read back.
        let interest = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        self.epoll.add(&*event, EpollEvent::new(interest, token))?;
        Ok(Waker { event })
    }

    /// Waits until something is ready or `timeout` has passed; `None` waits without end.
    ///
    /// A signal ends it early with no events, so that the caller looks at its deadlines (and at
    /// what the signal said) again.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.ready = 0;
        self.ready = match pwait2(self.epoll.0.as_fd(), &mut self.events, timeout) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {
                // Before Linux 5.11: milliseconds, rounded up so as not to spin.
                let millis = |timeout: Duration| timeout.as_nanos().div_ceil(1_000_000);
                let millis =
                    timeout.map_or(-1, |timeout| millis(timeout).try_into().unwrap_or(i32::MAX));
                wait_millis(self.epoll.0.as_fd(), &mut self.events, millis)
            }
            result => result,
        }
        .or_else(|error| match error.kind() {
            io::ErrorKind::Interrupted => Ok(0),
            _ => Err(error),
        })?;
        Ok(())
    }

    /// Events that the last wait found.
    pub fn events(&self) -> impl Iterator<Item = Event> + '_ {
        let failed = EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP;
        self.events[..self.ready].iter().map(move |event| Event {
            token: event.data(),
            readable: event.events().intersects(EpollFlags::EPOLLIN | failed),
            writable: event.events().intersects(EpollFlags::EPOLLOUT | failed),
        })
    }
}

/// epoll_pwait2(2), through syscall(2): musl has no wrapper.
#[allow(unsafe_code)]
fn pwait2(
    epoll: BorrowedFd<'_>,
    events: &mut [EpollEvent; EVENTS],
    timeout: Option<Duration>,
) -> io::Result<usize> {
    /// The kernel's timespec, which has 64 bits on every architecture.
    #[repr(C)]
    struct Timespec {
        seconds: i64,
        nanoseconds: i64,
    }
    let timeout = timeout.map(|timeout| Timespec {
        seconds: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        nanoseconds: timeout.subsec_nanos().into(),
    });
    // SAFETY: EpollEvent is a transparent epoll_event and `events` has room for EVENTS of them;
    // `timeout` outlives the call, or is null for none; a null signal mask changes nothing.
    let ready = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            epoll.as_raw_fd(),
            events.as_mut_ptr().cast::<libc::epoll_event>(),
            EVENTS as libc::c_int,
            timeout
                .as_ref()
                .map_or(std::ptr::null(), std::ptr::from_ref),
            std::ptr::null::<libc::sigset_t>(),
            0usize,
        )
    };
    usize::try_from(ready).map_err(|_| io::Error::last_os_error())
}

#[allow(unsafe_code)]
fn wait_millis(
    epoll: BorrowedFd<'_>,
    events: &mut [EpollEvent; EVENTS],
    millis: i32,
) -> io::Result<usize> {
    // SAFETY: EpollEvent is a transparent epoll_event and `events` has room for EVENTS of them.
    let ready = unsafe {
        libc::epoll_wait(
            epoll.as_raw_fd(),
            events.as_mut_ptr().cast::<libc::epoll_event>(),
            EVENTS as libc::c_int,
            millis,
        )
    };
    usize::try_from(ready).map_err(|_| io::Error::last_os_error())
}

/// Ends a [`Poller`]'s wait from any thread.
#[derive(Clone)]
pub struct Waker {
    event: Arc<EventFd>,
}

impl Waker {
    /// Wakes the poller, now or at its next wait.
    pub fn wake(&self) {
        // Fails only with EAGAIN, when 2^64 - 2 wakes were never read: already readable.
        _ = self.event.write(1);
    }
}

/// Lets the calling thread's waits end on time: by default the kernel may be 50 us late, which is
/// many datagrams of pacing.
#[allow(unsafe_code)]
pub fn precise_timers() -> io::Result<()> {
    // SAFETY: PR_SET_TIMERSLACK takes nanoseconds by value.
    match unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::time::TimeSpec;
    use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
    use std::os::unix::net::UnixDatagram;
    use std::time::Instant;

    /// Longer than anything but a hang.
    const LONG: Duration = Duration::from_secs(120);

    fn ready(poller: &mut Poller, timeout: Duration) -> Vec<Event> {
        poller.wait(Some(timeout)).expect("wait");
        poller.events().collect()
    }

    #[test]
    fn reports_readiness_by_token_until_served() {
        let (near, far) = UnixDatagram::pair().expect("pair");
        let mut poller = Poller::new().expect("epoll");
        poller.add(&near, 7, Interest::Read).expect("add");
        assert_eq!(ready(&mut poller, Duration::ZERO), []);

        far.send(b"x").expect("send");
        let readable = Event {
            token: 7,
            readable: true,
            writable: false,
        };
        assert_eq!(ready(&mut poller, LONG), [readable]);
        assert_eq!(ready(&mut poller, Duration::ZERO), [readable]);

        poller
            .modify(&near, 8, Interest::ReadWrite)
            .expect("modify");
        let both = Event {
            token: 8,
            readable: true,
            writable: true,
        };
        assert_eq!(ready(&mut poller, Duration::ZERO), [both]);

        poller.remove(&near).expect("remove");
        assert_eq!(ready(&mut poller, Duration::ZERO), []);
    }

    #[test]
    fn a_waker_ends_a_wait_once() {
        let mut poller = Poller::new().expect("epoll");
        let waker = poller.waker(3).expect("waker");
        let other = waker.clone();
        let thread = std::thread::spawn(move || (0..5).for_each(|_| other.wake()));
        poller.wait(None).expect("wait");
        assert_eq!(
            poller.events().map(|event| event.token).collect::<Vec<_>>(),
            [3]
        );
        thread.join().expect("join");

        poller.wait(Some(Duration::ZERO)).expect("wait");
        assert_eq!(ready(&mut poller, Duration::ZERO), []);
        waker.wake();
        assert_eq!(ready(&mut poller, LONG).len(), 1);
    }

    /// A timer of the kernel's ends between what a wait is to take and the next whole millisecond. A busy machine may be
    /// late for both; a wait that counts milliseconds never ends before the timer.
    #[test]
    fn waits_no_shorter_than_asked_and_not_for_whole_milliseconds() {
        precise_timers().expect("timer slack");
        let timeout = Duration::from_micros(200);
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK);
        let timer = timer.expect("a timer");
        let mut poller = Poller::new().expect("epoll");
        poller.add(&timer, 1, Interest::Read).expect("add");
        let (begin, mut in_time) = (Instant::now(), 0);
        while in_time < 20 {
            let later = Expiration::OneShot(TimeSpec::from_duration(4 * timeout));
            let set = timer.set(later, TimerSetTimeFlags::empty());
            set.expect("it is set, and has not run out");
            let start = Instant::now();
            if ready(&mut poller, timeout).is_empty() {
                let waited = start.elapsed();
                assert!(waited >= timeout, "{waited:?}");
                in_time += 1;
            }
            assert!(
                begin.elapsed() < LONG,
                "{in_time} of 20 waits ended in time"
            );
        }
    }

    #[test]
    #[allow(unsafe_code)]
    fn a_signal_ends_a_wait_without_events() {
        extern "C" fn ignore(_: libc::c_int) {}
        let handler = ignore as extern "C" fn(libc::c_int);
        // SAFETY: the handler does nothing; no other test uses this signal.
        unsafe { libc::signal(libc::SIGUSR2, handler as libc::sighandler_t) };
        let (tell, told) = std::sync::mpsc::channel();
        let waiter = std::thread::spawn(move || {
            tell.send(nix::unistd::gettid().as_raw())
                .expect("the test waits");
            let mut poller = Poller::new().expect("epoll");
            poller.wait(None).expect("a signal is no error");
            poller.events().count()
        });
        let thread = told.recv().expect("the waiter tells");
        // It may not wait yet when the first signal comes.
        while !waiter.is_finished() {
            // SAFETY: sends a signal that has a handler to a thread of this process.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGUSR2) };
            std::thread::yield_now();
        }
        assert_eq!(waiter.join().expect("waiter"), 0);
    }

    #[test]
    fn a_hang_up_is_readable() {
        let (near, far) = std::os::unix::net::UnixStream::pair().expect("pair");
        let mut poller = Poller::new().expect("epoll");
        poller.add(&near, 1, Interest::Read).expect("add");
        drop(far);
        assert!(ready(&mut poller, LONG)[0].readable);
    }
}
