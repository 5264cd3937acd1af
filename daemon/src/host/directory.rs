//! The host's directory of users, which may be a server elsewhere that takes minutes to answer, or never does.

use std::time::Duration;

use anyhow::Context as _;
use sd_notify::NotifyState;
use tokio::time::timeout;

/// Time before the log first says what is waited for, and between two such words.
const SAY_AFTER: Duration = Duration::from_secs(2);
const SAY_EVERY: Duration = Duration::from_secs(10);
/// Time that systemd gives a start in addition, each time.
const EXTENSION: Duration = Duration::from_secs(30);

/// Runs what asks the directory away from the calling thread, and says so while that takes long.
///
/// # Errors
/// The lookup panicked.
pub(crate) async fn ask<T: Send + 'static>(
    look_up: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<T> {
    let mut asked = tokio::task::spawn_blocking(look_up);
    let (mut waited, mut patience) = (Duration::ZERO, SAY_AFTER);
    loop {
        match timeout(patience, &mut asked).await {
            Ok(answer) => {
                if !waited.is_zero() {
                    tracing::info!("the host's directory of users has answered");
                    tell_systemd(&[NotifyState::Status("")]);
                }
                return answer.context("cannot look up the users of rules");
            }
            Err(_) => waited += patience,
        }
        patience = SAY_EVERY;
        let what = format!(
            "the users that rules name are being looked up for {} s: see that what \"passwd\" of \
             /etc/nsswitch.conf names answers (getent passwd USER)",
            waited.as_secs()
        );
        tracing::warn!("{what}");
        let extension = EXTENSION.as_micros() as u32;
        tell_systemd(&[
            NotifyState::Status(&what),
            NotifyState::ExtendTimeoutUsec(extension),
        ]);
    }
}

/// Tells systemd, if it is there.
fn tell_systemd(states: &[NotifyState<'_>]) {
    let _ = sd_notify::notify(states);
}
