//! A control plane that runs in the pool of `krypton_tests::planes`, for as long as this process lives.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::Mutex,
};

use anyhow::{Context, Result, bail};
use krypton_runtime::off_thread;
use serde::{Deserialize, Serialize};

use super::{Component, credentials::Credentials, lock};

/// The socket of the pool.
pub(crate) const SOCKET: &str = "KRYPTON_PLANES";

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    Lease,
    Spawn(Component),
    Kill(Vec<Component>),
    /// The test has passed so far, and needs this plane no longer.
    Done,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Plane(Box<Plane>),
    Well,
    Failed(String),
}

/// All that a test has to know of its control plane.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Plane {
    pub(super) folder: PathBuf,
    pub(super) port: u16,
    pub(super) etcd_port: u16,
    pub(super) credentials: Credentials,
    pub(super) tokens: (String, String),
}

#[derive(Debug)]
pub(super) struct Lease {
    stream: Mutex<BufReader<UnixStream>>,
}

impl Lease {
    /// None without a pool.
    pub(super) async fn take() -> Result<Option<(Self, Plane)>> {
        let Some(socket) = std::env::var_os(SOCKET) else {
            return Ok(None);
        };
        let taking = off_thread::start(move || {
            let stream = UnixStream::connect(&socket).context("asking the pool for a plane")?;
            let lease = Self {
                stream: Mutex::new(BufReader::new(stream)),
            };
            match lease.ask(&Ask::Lease)? {
                Answer::Plane(plane) => Ok(Some((lease, *plane))),
                answer => bail!("the pool gives no plane: {answer:?}"),
            }
        });
        taking.await?
    }

    fn ask(&self, ask: &Ask) -> Result<Answer> {
        let mut stream = lock(&self.stream);
        let mut line = serde_json::to_string(ask)?;
        line.push('\n');
        stream.get_mut().write_all(line.as_bytes())?;
        line.clear();
        stream.read_line(&mut line)?;
        serde_json::from_str(&line).context("the pool has ended")
    }

    pub(super) fn order(&self, ask: &Ask) -> Result<()> {
        match self.ask(ask)? {
            Answer::Well => Ok(()),
            answer => bail!("{ask:?}: {answer:?}"),
        }
    }

    /// The lease lasts until this process ends, as programs of the test may still write to the plane.
    pub(super) fn end(self) {
        if self.order(&Ask::Done).is_ok() {
            std::mem::forget(self);
        }
    }
}
