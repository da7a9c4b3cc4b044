//! A pool of control planes for the tests of one run. A test leases a whole one until its process ends, and adds the
//! controllers that it wants. The pool then ends these and restores the plane, or discards it if the test failed or
//! killed etcd or the apiserver.

use std::{
    convert::Infallible,
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};
use futures::{StreamExt, stream::FuturesUnordered};
use rustix::process::Signal;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        UnixListener, UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::Mutex,
};

use crate::cluster::{
    Cluster, Component, Parts,
    lease::{PoolRequest, PoolResponse},
    reset::InitialState,
};

/// Each needs half a GB.
const MAX_IDLE: usize = 12;
/// An API server needs more memory with each lease.
const MAX_LEASES: u32 = 20;

/// A control plane and its initial etcd data.
struct PooledPlane {
    cluster: Cluster,
    initial_state: InitialState,
    leases: u32,
}

impl PooledPlane {
    async fn start() -> Result<Self> {
        let cluster = Cluster::start_own("plane", Parts::ControlPlane).await?;
        let initial_state = InitialState::capture(&cluster).await?;
        Ok(Self {
            cluster,
            initial_state,
            leases: 0,
        })
    }

    async fn restore(&mut self) -> Result<()> {
        self.cluster.kill(&Component::CONTROLLERS)?;
        self.initial_state.restore().await
    }
}

#[derive(Default)]
struct Pool {
    /// The last one returned is the first one leased.
    idle: Mutex<Vec<PooledPlane>>,
    started: AtomicU32,
    leases: AtomicU32,
}

impl Drop for Pool {
    fn drop(&mut self) {
        let started = self.started.load(Ordering::Relaxed);
        let leases = self.leases.load(Ordering::Relaxed);
        eprintln!("planes: {started} were started for {leases} leases");
    }
}

/// Serves leases at this socket until it is dropped.
pub async fn serve(socket: &Path) -> Result<Infallible> {
    let listener = UnixListener::bind(socket).context("creating the pool's socket")?;
    let pool = Pool::default();
    let mut leases = FuturesUnordered::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted.context("waiting for tests")?;
                leases.push(pool.lease(stream));
            }
            Some(ended) = leases.next() => {
                if let Err(error) = ended {
                    eprintln!("planes: {error:#}");
                }
            }
        }
    }
}

impl Pool {
    async fn lease(&self, stream: UnixStream) -> Result<()> {
        let (reader, mut writer) = stream.into_split();
        let mut requests = BufReader::new(reader).lines();
        let Some(PoolRequest::Lease) = receive(&mut requests).await? else {
            return Ok(());
        };
        let mut plane = match self.take().await {
            Ok(plane) => plane,
            Err(error) => {
                return send(&mut writer, &PoolResponse::Failed(format!("{error:#}"))).await;
            }
        };
        plane.leases += 1;
        self.leases.fetch_add(1, Ordering::Relaxed);
        send(
            &mut writer,
            &PoolResponse::Plane(Box::new(plane.cluster.info())),
        )
        .await?;
        let (mut is_intact, mut has_passed) = (true, false);
        while let Ok(Some(request)) = receive(&mut requests).await {
            let outcome = match request {
                PoolRequest::Lease => continue,
                PoolRequest::Done => {
                    has_passed = true;
                    Ok(())
                }
                PoolRequest::Spawn(component) => plane.cluster.spawn(component),
                PoolRequest::Kill(components) => {
                    let controllers = Component::CONTROLLERS;
                    is_intact &= components
                        .iter()
                        .all(|component| controllers.contains(component));
                    plane.cluster.kill(&components)
                }
            };
            let response = match outcome {
                Ok(()) => PoolResponse::Well,
                Err(error) => PoolResponse::Failed(format!("{error:#}")),
            };
            send(&mut writer, &response).await?;
        }
        if !has_passed {
            plane.cluster.keep_files();
        } else if is_intact && plane.leases < MAX_LEASES {
            plane.restore().await?;
            self.return_plane(plane).await?;
        }
        Ok(())
    }

    async fn take(&self) -> Result<PooledPlane> {
        let idle = self.idle.lock().await.pop();
        match idle {
            Some(plane) => {
                plane.cluster.signal(Signal::CONT)?;
                Ok(plane)
            }
            None => {
                self.started.fetch_add(1, Ordering::Relaxed);
                PooledPlane::start().await
            }
        }
    }

    /// Stops the components of an idle plane. Running for two minutes, they use as much CPU as their start.
    async fn return_plane(&self, plane: PooledPlane) -> Result<()> {
        plane.cluster.signal(Signal::STOP)?;
        let mut idle = self.idle.lock().await;
        if idle.len() < MAX_IDLE {
            idle.push(plane);
        }
        Ok(())
    }
}

async fn receive(requests: &mut Lines<BufReader<OwnedReadHalf>>) -> Result<Option<PoolRequest>> {
    let line = requests.next_line().await?;
    Ok(line.map(|line| serde_json::from_str(&line)).transpose()?)
}

async fn send(writer: &mut OwnedWriteHalf, response: &PoolResponse) -> Result<()> {
    let line = serde_json::to_string(response)? + "\n";
    Ok(writer.write_all(line.as_bytes()).await?)
}
