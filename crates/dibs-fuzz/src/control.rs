//! What comes in by the control socket, and what dibsctl gets as an answer.

use dibs_control::{
    LineBuffer, MAX_REPLY, MAX_REQUEST, decode_reply, decode_request, encode_reply, encode_request,
};

use crate::input::Input;

/// The daemon reads as much at once.
const PIECE: usize = 4096;

/// The first byte says who reads; pieces of lengths that the fuzzer chooses follow.
pub fn control(data: &[u8]) {
    let mut input = Input::new(data);
    let (limit, read): (usize, fn(&str)) = if input.flag() {
        (MAX_REPLY, reply)
    } else {
        (MAX_REQUEST, request)
    };
    let piece = 1 + usize::from(input.u16()) % PIECE;
    // Long lines, without long inputs.
    let repeat = match input.u8() {
        n @ 250.. => 1 << (n - 248),
        _ => 1,
    };
    let bytes = input.rest().repeat(repeat);
    let mut lines = LineBuffer::new(limit);
    for piece in bytes.chunks(piece) {
        lines.extend(piece);
        loop {
            match lines.next_line() {
                Ok(Some(line)) => {
                    assert!(line.len() <= limit && !line.contains('\n'));
                    read(&line);
                }
                Ok(None) => break,
                // The connection ends.
                Err(error) => return drop(error.to_string()),
            }
        }
    }
}

fn request(line: &str) {
    match decode_request(line) {
        Ok(request) => {
            let again = encode_request(&request);
            let text = again.strip_suffix('\n').expect("a line has an end");
            assert!(!text.contains('\n'));
            assert_eq!(decode_request(text).as_ref(), Ok(&request));
        }
        Err(failure) => {
            // It is sent to the client, on one line.
            let answer = encode_reply(&Err(failure.clone()));
            assert_eq!(answer.matches('\n').count(), 1);
            assert_eq!(decode_reply(answer.trim_end()).ok(), Some(Err(failure)));
        }
    }
}

fn reply(line: &str) {
    if let Ok(answer) = decode_reply(line) {
        let again = encode_reply(&answer);
        let text = again.strip_suffix('\n').expect("a line has an end");
        assert!(!text.contains('\n'));
        assert_eq!(decode_reply(text).ok(), Some(answer));
    }
}
