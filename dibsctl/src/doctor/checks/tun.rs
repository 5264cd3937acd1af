//! Whether there is a way to make TUNs.

use std::fs::File;
use std::io::{self, ErrorKind};

use crate::doctor::finding::Finding;

/// By what came of opening `/dev/net/tun`.
pub(crate) fn judge(root: bool, opened: &io::Result<File>) -> Finding {
    let load = "run modprobe tun (modules-load.d/dibs.conf does at boot); give a container \
                the device /dev/net/tun";
    match opened {
        Ok(_) => Finding::fine("tun", "/dev/net/tun can be opened"),
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !root => {
            Finding::needs_root("tun")
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Finding::failed(
            "tun",
            format!("/dev/net/tun: {error}"),
            "let this unit or container use the device (DeviceAllow=/dev/net/tun rw)",
        ),
        Err(error) => Finding::failed("tun", format!("/dev/net/tun: {error}"), load),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;

    #[test]
    fn what_is_missing_is_told_from_what_is_forbidden() {
        let error = |kind: ErrorKind| Err(io::Error::from(kind));
        let outcome = |root, opened| judge(root, &opened).outcome;
        assert_eq!(outcome(false, File::open("/dev/null")), Outcome::Ok);
        assert_eq!(outcome(true, error(ErrorKind::NotFound)), Outcome::Failed);
        let denied = || error(ErrorKind::PermissionDenied);
        assert_eq!(outcome(false, denied()), Outcome::Skipped);
        assert_eq!(outcome(true, denied()), Outcome::Failed);
    }
}
