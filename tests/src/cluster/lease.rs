//! Leases a control plane from the pool of `krypton_tests::planes`, until this process ends.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use krypton_runtime::off_thread;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{Component, credentials::Credentials};

/// Variable with the path of the pool's socket.
pub(crate) const SOCKET: &str = "KRYPTON_PLANES";

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum PoolRequest {
    Lease,
    Spawn(Component),
    Kill(Vec<Component>),
    /// The test has passed and no longer needs this control plane.
    Done,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum PoolResponse {
    Plane(Box<PlaneInfo>),
    Well,
    Failed(String),
}

/// The description of a leased control plane for its test.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct PlaneInfo {
    pub(super) folder: PathBuf,
    pub(super) port: u16,
    pub(super) etcd_port: u16,
    pub(super) credentials: Credentials,
    pub(super) tokens: (String, String),
}

#[derive(Debug)]
pub(super) struct PlaneLease {
    stream: Mutex<BufReader<UnixStream>>,
}

impl PlaneLease {
    /// Returns `None` if there is no pool.
    pub(super) async fn take() -> Result<Option<(Self, PlaneInfo)>> {
        let Some(socket) = std::env::var_os(SOCKET) else {
            return Ok(None);
        };
        let taking = off_thread::start(move || {
            let stream =
                UnixStream::connect(&socket).context("requesting a control plane from the pool")?;
            let lease = Self {
                stream: Mutex::new(BufReader::new(stream)),
            };
            match lease.request(&PoolRequest::Lease)? {
                PoolResponse::Plane(plane) => Ok(Some((lease, *plane))),
                response => bail!("the pool returned no control plane: {response:?}"),
            }
        });
        taking.await?
    }

    fn request(&self, request: &PoolRequest) -> Result<PoolResponse> {
        let mut stream = self.stream.lock();
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        stream.get_mut().write_all(line.as_bytes())?;
        line.clear();
        stream.read_line(&mut line)?;
        serde_json::from_str(&line).context("the pool has ended")
    }

    pub(super) fn execute(&self, request: &PoolRequest) -> Result<()> {
        match self.request(request)? {
            PoolResponse::Well => Ok(()),
            response => bail!("{request:?}: {response:?}"),
        }
    }

    /// Marks the test as passed. The lease lasts until this process ends, because its programs may still write to the
    /// control plane.
    pub(super) fn end(self) {
        if self.execute(&PoolRequest::Done).is_ok() {
            std::mem::forget(self);
        }
    }
}
