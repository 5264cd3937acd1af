//! What wakes the tasks that go on by themselves.

use tokio::sync::Notify;

/// A task that waits until it is told that there is something to do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Asks peers to confirm.
    Confirm,
    /// Tells peers of choices.
    Tell,
    /// Locks connections.
    Lock,
    /// Follows the time of day.
    Hours,
    /// Follows which peers have a session.
    Sessions,
    /// Counts what paths carry.
    Volumes,
    /// Tries again what the kernel did not take.
    Repair,
    /// Looks for users whom rules name.
    Users,
    /// Looks why ports do not answer peers.
    Silence,
    /// Looks up the names of endpoints.
    Names,
}

impl Task {
    /// Number of tasks: the last one stands here.
    const COUNT: usize = Self::Names as usize + 1;
}

/// One of them for each [`Task`].
#[derive(Default)]
pub(crate) struct Wakers([Notify; Task::COUNT]);

impl Wakers {
    /// Wakes the task, now or as soon as it waits.
    pub(crate) fn wake(&self, task: Task) {
        self.0[task as usize].notify_one();
    }

    /// Waits until the task is woken.
    pub(crate) async fn woken(&self, task: Task) {
        self.0[task as usize].notified().await;
    }
}
