//! A proxy in front of an apiserver that carries, delays, swallows, holds or cuts what passes, as it is told.

use std::{
    collections::VecDeque,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use krypton_runtime::newest::NewestSeen as _;
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use crate::{answering_proxy::AnsweringProxy, cluster::Cluster, membership::write_secret};

/// What becomes of what passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    Pass,
    /// Connections are reset, and new ones at once.
    Cut,
    /// Each direction takes so much longer.
    Delay(Duration),
    /// Half-open: connections are accepted and stay, and what goes there, or comes back, is lost.
    Swallow {
        there: bool,
        back: bool,
    },
    /// Nothing is lost and nothing moves.
    Freeze,
}

/// Of one direction at a time, so that a slow reader slows the writer, as without a proxy.
const CHUNKS: usize = 64;
const CHUNK_BYTES: usize = 16 << 10;

/// A running line to one address.
#[derive(Debug)]
pub struct FaultLine {
    traffic: watch::Sender<Traffic>,
    accepting: JoinHandle<()>,
    address: SocketAddr,
}

impl FaultLine {
    /// To a server that need not listen yet, passing all.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn to(to: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .context("listening for a faulty line")?;
        let address = listener.local_addr().context("asking for our own port")?;
        let (traffic, rule) = watch::channel(Traffic::Pass);
        let accepting = tokio::spawn(async move {
            while let Ok((from, _)) = listener.accept().await {
                // It ends with its connection, or with the sender of the rule.
                tokio::spawn(carry(from, to, rule.clone()));
            }
        });
        Ok(Self {
            traffic,
            accepting,
            address,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on, for open connections too. One that has lost something is reset when its loss ends.
    pub fn set(&self, traffic: Traffic) {
        self.traffic.send_replace(traffic);
    }
}

impl Drop for FaultLine {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// A running proxy. What goes through it stays reachable directly.
#[derive(Debug)]
pub struct FaultProxy {
    line: FaultLine,
    folder: TempDir,
}

impl FaultProxy {
    /// In front of the apiserver of `cluster`, passing all.
    ///
    /// # Errors
    /// When it cannot listen, or its kubeconfig not be written.
    pub async fn before(cluster: &Cluster) -> Result<Self> {
        Self::on_the_way(&cluster.server(), cluster.kubeconfig()).await
    }

    /// In front of what is in front of the apiserver.
    ///
    /// # Errors
    /// As `before`.
    pub async fn before_proxy(proxy: &AnsweringProxy) -> Result<Self> {
        Self::on_the_way(&proxy.server(), &proxy.kubeconfig()).await
    }

    async fn on_the_way(server: &str, kubeconfig: &Path) -> Result<Self> {
        let to: SocketAddr = server
            .trim_start_matches("https://")
            .parse()
            .with_context(|| format!("reading {server}"))?;
        let line = FaultLine::to(to).await?;
        let direct = fs::read_to_string(kubeconfig).context("reading a kubeconfig")?;
        // The certificate is for the address, whatever the port.
        let through = direct.replace(server, &format!("https://{}", line.address()));
        let folder = TempDir::with_prefix("krypton-faults-").context("making a folder")?;
        write_secret(&folder.path().join("kubeconfig.yaml"), &through)?;
        Ok(Self { line, folder })
    }

    /// The administrator's, by this way.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig.yaml")
    }

    /// As of a line.
    pub fn set(&self, traffic: Traffic) {
        self.line.set(traffic);
    }
}

async fn carry(mut from: TcpStream, to: SocketAddr, mut rule: watch::Receiver<Traffic>) {
    let outcome = async {
        if rule.see() == Traffic::Cut {
            return Ok(());
        }
        let mut to = TcpStream::connect(to).await?;
        let (mut from_read, mut from_write) = from.split();
        let (mut to_read, mut to_write) = to.split();
        let there = pump(&mut from_read, &mut to_write, rule.clone(), |traffic| {
            matches!(traffic, Traffic::Swallow { there: true, .. })
        });
        let back = pump(&mut to_read, &mut from_write, rule.clone(), |traffic| {
            matches!(traffic, Traffic::Swallow { back: true, .. })
        });
        tokio::select! {
            ended = there => ended?,
            ended = back => ended?,
        }
        Ok::<_, io::Error>(())
    };
    // Whatever ended it, the other end learns of it by the reset.
    drop(outcome.await);
    drop(from.set_zero_linger());
}

/// Carries one direction until either end, or the rule, ends it.
async fn pump(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    mut rule: watch::Receiver<Traffic>,
    swallowed: impl Fn(Traffic) -> bool,
) -> io::Result<()> {
    let mut waiting: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut lost = false;
    let mut open = true;
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let traffic = rule.see();
        if traffic == Traffic::Cut || (lost && !swallowed(traffic)) {
            return Ok(());
        }
        let frozen = traffic == Traffic::Freeze;
        let due = waiting.front().map(|(due, _)| *due).filter(|_| !frozen);
        tokio::select! {
            changed = rule.changed() => if changed.is_err() { return Ok(()) },
            count = from.read(&mut buffer), if open && !frozen && waiting.len() < CHUNKS => {
                let count = count?;
                let delay = match traffic {
                    Traffic::Delay(delay) => delay,
                    _ => Duration::ZERO,
                };
                open = count > 0;
                if swallowed(traffic) {
                    lost = true;
                } else {
                    let chunk = buffer.get(..count).unwrap_or_default().to_vec();
                    waiting.push_back((Instant::now() + delay, chunk));
                }
            }
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                let chunk = waiting.pop_front().map(|(_, chunk)| chunk).unwrap_or_default();
                if chunk.is_empty() {
                    return to.shutdown().await;
                }
                to.write_all(&chunk).await?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A way to a server that says everything back, and who is at its end.
    async fn way() -> (watch::Sender<Traffic>, TcpStream) {
        let [echo, proxy] = [
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
        ];
        let to = echo.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = echo.accept().await.unwrap();
            let (mut read, mut write) = stream.split();
            drop(tokio::io::copy(&mut read, &mut write).await);
        });
        let (traffic, rule) = watch::channel(Traffic::Pass);
        let client = TcpStream::connect(proxy.local_addr().unwrap())
            .await
            .unwrap();
        let (from, _) = proxy.accept().await.unwrap();
        tokio::spawn(carry(from, to, rule));
        (traffic, client)
    }

    async fn said(client: &mut TcpStream, word: &[u8; 4]) -> io::Result<bool> {
        client.write_all(word).await?;
        let mut heard = [0; 4];
        client.read_exact(&mut heard).await?;
        Ok(heard == *word)
    }

    #[tokio::test]
    async fn passed_delayed_and_frozen_traffic_is_delivered() {
        let (traffic, mut client) = way().await;
        assert!(said(&mut client, b"pass").await.unwrap());
        traffic.send_replace(Traffic::Delay(Duration::from_millis(50)));
        assert!(said(&mut client, b"late").await.unwrap());
        traffic.send_replace(Traffic::Freeze);
        client.write_all(b"held").await.unwrap();
        traffic.send_replace(Traffic::Pass);
        let mut heard = [0; 4];
        client.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"held");
    }

    #[tokio::test]
    async fn cut_or_lossy_connection_is_reset() {
        let (traffic, mut client) = way().await;
        traffic.send_replace(Traffic::Cut);
        assert!(said(&mut client, b"gone").await.is_err());

        let (traffic, mut client) = way().await;
        let swallow = |there, back| Traffic::Swallow { there, back };
        traffic.send_replace(swallow(false, true));
        client.write_all(b"lost").await.unwrap();
        // The other direction is not touched; what comes back of it is.
        tokio::time::timeout(Duration::from_millis(100), client.readable())
            .await
            .unwrap_err();
        traffic.send_replace(Traffic::Pass);
        assert!(said(&mut client, b"more").await.is_err());
    }
}
