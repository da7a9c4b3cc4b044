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
    lease::{Answer, Ask},
    reset::Start,
};

/// Each needs half a GB.
const IDLE_MOST: usize = 12;
/// An API server needs more memory with each lease.
const LEASES_MOST: u32 = 20;

/// A control plane and its initial etcd data.
struct Plane {
    cluster: Cluster,
    start: Start,
    leases: u32,
}

impl Plane {
    async fn start() -> Result<Self> {
        let cluster = Cluster::start_own("plane", Parts::ControlPlane).await?;
        let start = Start::of(&cluster).await?;
        Ok(Self {
            cluster,
            start,
            leases: 0,
        })
    }

    async fn restore(&mut self) -> Result<()> {
        self.cluster.kill(&Component::CONTROLLERS)?;
        self.start.restore().await
    }
}

#[derive(Default)]
struct Pool {
    /// The last one returned is the first one leased.
    idle: Mutex<Vec<Plane>>,
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
        let mut asked = BufReader::new(reader).lines();
        let Some(Ask::Lease) = next(&mut asked).await? else {
            return Ok(());
        };
        let mut plane = match self.take().await {
            Ok(plane) => plane,
            Err(error) => return say(&mut writer, &Answer::Failed(format!("{error:#}"))).await,
        };
        plane.leases += 1;
        self.leases.fetch_add(1, Ordering::Relaxed);
        say(&mut writer, &Answer::Plane(Box::new(plane.cluster.plane()))).await?;
        let (mut intact, mut done) = (true, false);
        while let Ok(Some(ask)) = next(&mut asked).await {
            let did = match ask {
                Ask::Lease => continue,
                Ask::Done => {
                    done = true;
                    Ok(())
                }
                Ask::Spawn(component) => plane.cluster.spawn(component),
                Ask::Kill(components) => {
                    let controllers = Component::CONTROLLERS;
                    intact &= components.iter().all(|one| controllers.contains(one));
                    plane.cluster.kill(&components)
                }
            };
            let answer = match did {
                Ok(()) => Answer::Well,
                Err(error) => Answer::Failed(format!("{error:#}")),
            };
            say(&mut writer, &answer).await?;
        }
        if !done {
            plane.cluster.keep_files();
        } else if intact && plane.leases < LEASES_MOST {
            plane.restore().await?;
            self.give_back(plane).await?;
        }
        Ok(())
    }

    async fn take(&self) -> Result<Plane> {
        let idle = self.idle.lock().await.pop();
        match idle {
            Some(plane) => {
                plane.cluster.signal(Signal::CONT)?;
                Ok(plane)
            }
            None => {
                self.started.fetch_add(1, Ordering::Relaxed);
                Plane::start().await
            }
        }
    }

    /// Stops the components of an idle plane. Running for two minutes, they use as much CPU as their start.
    async fn give_back(&self, plane: Plane) -> Result<()> {
        plane.cluster.signal(Signal::STOP)?;
        let mut idle = self.idle.lock().await;
        if idle.len() < IDLE_MOST {
            idle.push(plane);
        }
        Ok(())
    }
}

async fn next(asked: &mut Lines<BufReader<OwnedReadHalf>>) -> Result<Option<Ask>> {
    let line = asked.next_line().await?;
    Ok(line.map(|line| serde_json::from_str(&line)).transpose()?)
}

async fn say(writer: &mut OwnedWriteHalf, answer: &Answer) -> Result<()> {
    let line = serde_json::to_string(answer)? + "\n";
    Ok(writer.write_all(line.as_bytes()).await?)
}
