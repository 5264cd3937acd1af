//! The two settings of a TUN that the ioctls of tun-rs cannot make: the length of its ring
//! (SIOCSIFTXQLEN is denied in user namespaces) and `noqueue`.
//!
//! `noqueue` is asked for by name. A txqueuelen of 0 before the device comes up selects it too,
//! but a TUN's ring has that length as well, and then drops every packet (measured on 6.18).

use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, Read, Write};

const NLMSG_HDR: usize = 16;

/// Makes the device hold up to `frames` for its reader: txqueuelen, which sizes a TUN's ring.
pub(crate) fn set_ring(if_index: u32, frames: u32) -> io::Result<()> {
    // ifinfomsg (rtnetlink(7)): family, type, index, flags, change.
    let mut body = vec![0; 4];
    body.extend(if_index.to_ne_bytes());
    body.extend([0; 8]);
    put_attribute(&mut body, libc::IFLA_TXQLEN, &frames.to_ne_bytes());
    request(libc::RTM_NEWLINK, 0, &body)
}

/// Makes `noqueue` the root qdisc of the device; it stays so when the device goes up.
pub(crate) fn set_noqueue(if_index: u32) -> io::Result<()> {
    // tcmsg (rtnetlink(7)): family, index, handle (the kernel's choice), parent, info.
    const TC_H_ROOT: u32 = u32::MAX;
    let mut body = vec![0; 4];
    for word in [if_index, 0, TC_H_ROOT, 0] {
        body.extend(word.to_ne_bytes());
    }
    put_attribute(&mut body, libc::TCA_KIND, b"noqueue\0");
    request(
        libc::RTM_NEWQDISC,
        libc::NLM_F_CREATE | libc::NLM_F_REPLACE,
        &body,
    )
}

/// Appends an attribute; all of ours are multiples of 4 bytes and need no padding.
fn put_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend((4 + value.len() as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
}

/// Sends one request and waits for its verdict.
fn request(kind: u16, flags: libc::c_int, body: &[u8]) -> io::Result<()> {
    let flags = flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK;
    let mut message = Vec::new();
    message.extend(((NLMSG_HDR + body.len()) as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((flags as u16).to_ne_bytes());
    message.extend([0; 8]); // sequence number, port
    message.extend(body);
    let mut socket = Socket::new(
        Domain::from(libc::AF_NETLINK),
        Type::RAW.cloexec(),
        Some(Protocol::from(libc::NETLINK_ROUTE)),
    )?;
    socket.write_all(&message)?;
    let mut answer = [0; 512];
    let len = socket.read(&mut answer)?;
    verdict(&answer[..len])
}

/// The error code of an NLMSG_ERROR answer; 0 is the acknowledgement.
fn verdict(answer: &[u8]) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let bytes = answer.get(4..6).ok_or_else(invalid)?;
    let kind = u16::from_ne_bytes([bytes[0], bytes[1]]);
    let code = answer
        .get(NLMSG_HDR..)
        .and_then(|body| body.first_chunk())
        .ok_or_else(invalid)?;
    match (i32::from(kind), i32::from_ne_bytes(*code)) {
        (libc::NLMSG_ERROR, 0) => Ok(()),
        (libc::NLMSG_ERROR, code) => Err(io::Error::from_raw_os_error(-code)),
        _ => Err(invalid()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_the_kernels() {
        // No interface has this index; refused, with or without privileges.
        for result in [set_ring(i32::MAX as u32, 1), set_noqueue(i32::MAX as u32)] {
            let code = result.expect_err("no such device").raw_os_error();
            assert!(matches!(code, Some(libc::ENODEV | libc::EPERM)), "{code:?}");
        }
    }

    #[test]
    fn answers_cut_short_are_refused() {
        let mut answer = vec![0; 20];
        answer[4..6].copy_from_slice(&(libc::NLMSG_ERROR as u16).to_ne_bytes());
        assert!(verdict(&answer).is_ok());
        assert!((0..answer.len()).all(|len| verdict(&answer[..len]).is_err()));
        answer[16..].copy_from_slice(&(-libc::EBUSY).to_ne_bytes());
        assert_eq!(
            verdict(&answer).expect_err("busy").raw_os_error(),
            Some(libc::EBUSY)
        );
    }
}
