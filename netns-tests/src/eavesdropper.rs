//! Who hears everything on both links, and knows the plaintext.

use anyhow::{Result, ensure};
use dibs_lab::{Capture, Host, Recording};

use crate::plaintext::Plaintext;

/// Recordings of both links in progress.
#[derive(Debug)]
pub struct Eavesdropper {
    eth: Capture,
    wlan: Capture,
}

/// What was heard on both links.
#[derive(Debug)]
pub struct Heard {
    /// On the trusted link.
    pub eth: Recording,
    /// On the untrusted link.
    pub wlan: Recording,
}

impl Eavesdropper {
    pub(crate) fn new(host: &Host) -> Result<Self> {
        Ok(Self {
            eth: host.capture("eth0")?,
            wlan: host.capture("wlan0")?,
        })
    }

    /// Ends the recordings.
    ///
    /// # Errors
    /// If they are not complete.
    pub fn finish(self) -> Result<Heard> {
        Ok(Heard {
            eth: self.eth.finish()?,
            wlan: self.wlan.finish()?,
        })
    }

    /// Ends the recordings and checks that no part of 15 bytes of these streams was in plain, on
    /// either link, in `least` bytes or more.
    ///
    /// # Errors
    /// If there was, or too little passed to tell.
    pub fn heard_nothing(self, of: &[Plaintext], least: usize) -> Result<()> {
        let heard = self.finish()?;
        let plain = heard.plain(of);
        let bytes = heard.eth.bytes() + heard.wlan.bytes();
        ensure!(
            plain == [0, 0],
            "in plain: {} packets on eth, {} on wlan, of {} and {}",
            plain[0],
            plain[1],
            heard.eth.packets.len(),
            heard.wlan.packets.len()
        );
        ensure!(bytes >= least, "only {bytes} bytes passed");
        Ok(())
    }
}

impl Heard {
    /// How many packets carry a part of these streams: on the trusted link, on the untrusted one.
    pub fn plain(&self, of: &[Plaintext]) -> [usize; 2] {
        [&self.eth, &self.wlan].map(|recording| {
            let packets = recording.packets.iter();
            let holds = |frame: &[u8]| of.iter().any(|stream| stream.find(frame).is_some());
            packets.filter(|packet| holds(&packet.frame)).count()
        })
    }
}
