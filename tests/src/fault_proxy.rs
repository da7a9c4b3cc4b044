//! Runs a proxy in front of an API server. On request, it delays, drops, freezes or cuts the traffic.

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
    time::{Instant, sleep_until},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{answering_proxy::AnsweringProxy, cluster::Cluster, membership::write_secret};

/// Treatment of the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    Pass,
    /// Resets open connections, and new ones immediately.
    Cut,
    /// Adds this delay to each direction.
    Delay(Duration),
    /// Half-open: connections stay open, but data to the server, or data from it, is lost.
    Swallow {
        there: bool,
        back: bool,
    },
    /// Keeps all data, but forwards none.
    Freeze,
}

/// Limits for each direction, so a slow reader slows the writer as without a proxy.
const CHUNKS: usize = 64;
const CHUNK_BYTES: usize = 16 << 10;

/// A running proxy for connections to one address.
#[derive(Debug)]
pub struct FaultLine {
    traffic: watch::Sender<Traffic>,
    _accepting: AbortOnDropHandle<()>,
    address: SocketAddr,
}

impl FaultLine {
    /// Forwards all traffic to a server. The server doesn't need to listen yet.
    pub async fn start(server: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .context("listening for a faulty line")?;
        let address = listener.local_addr().context("reading the bound port")?;
        let (traffic, current_traffic) = watch::channel(Traffic::Pass);
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // The task ends with its connection, or when the sender of the traffic is dropped.
                tokio::spawn(forward(client, server, current_traffic.clone()));
            }
        });
        Ok(Self {
            traffic,
            _accepting: AbortOnDropHandle::new(accepting),
            address,
        })
    }

    /// Returns the address at which the proxy listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Applies to new and open connections. A connection that has lost data is reset when the loss ends.
    pub fn set(&self, traffic: Traffic) {
        self.traffic.send_replace(traffic);
    }
}

/// A running proxy. The server also stays reachable directly.
#[derive(Debug)]
pub struct FaultProxy {
    line: FaultLine,
    folder: TempDir,
}

impl FaultProxy {
    /// Starts a proxy in front of the API server of `cluster`. It forwards all traffic.
    pub async fn start(cluster: &Cluster) -> Result<Self> {
        Self::start_for_server(&cluster.server(), cluster.kubeconfig()).await
    }

    /// Starts a proxy in front of an [`AnsweringProxy`].
    pub async fn start_for_proxy(proxy: &AnsweringProxy) -> Result<Self> {
        Self::start_for_server(&proxy.server(), &proxy.kubeconfig()).await
    }

    async fn start_for_server(server: &str, kubeconfig: &Path) -> Result<Self> {
        let address: SocketAddr = server
            .trim_start_matches("https://")
            .parse()
            .with_context(|| format!("reading {server}"))?;
        let line = FaultLine::start(address).await?;
        let original = fs::read_to_string(kubeconfig).context("reading a kubeconfig")?;
        // The certificate names the address and is valid for any port.
        let proxied = original.replace(server, &format!("https://{}", line.address()));
        let folder = TempDir::with_prefix("krypton-faults-").context("creating a folder")?;
        write_secret(&folder.path().join("kubeconfig.yaml"), &proxied)?;
        Ok(Self { line, folder })
    }

    /// Returns the path of the administrator's kubeconfig for the proxy.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig.yaml")
    }

    /// Sets the treatment of the traffic, like [`FaultLine::set`].
    pub fn set(&self, traffic: Traffic) {
        self.line.set(traffic);
    }
}

async fn forward(
    mut client: TcpStream,
    server: SocketAddr,
    mut current_traffic: watch::Receiver<Traffic>,
) {
    let outcome = async {
        if current_traffic.get_and_update() == Traffic::Cut {
            return Ok(());
        }
        let mut server = TcpStream::connect(server).await?;
        let (mut client_read, mut client_write) = client.split();
        let (mut server_read, mut server_write) = server.split();
        let to_server = pump(
            &mut client_read,
            &mut server_write,
            current_traffic.clone(),
            |traffic| matches!(traffic, Traffic::Swallow { there: true, .. }),
        );
        let from_server = pump(
            &mut server_read,
            &mut client_write,
            current_traffic.clone(),
            |traffic| matches!(traffic, Traffic::Swallow { back: true, .. }),
        );
        tokio::select! {
            ended = to_server => ended?,
            ended = from_server => ended?,
        }
        Ok::<_, io::Error>(())
    };
    // The reset notifies the other end, regardless of the cause.
    drop(outcome.await);
    drop(client.set_zero_linger());
}

/// Forwards one direction until either end or the traffic setting stops it.
async fn pump(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    mut current_traffic: watch::Receiver<Traffic>,
    is_swallowed: impl Fn(Traffic) -> bool,
) -> io::Result<()> {
    let mut pending: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut has_lost_data = false;
    let mut is_open = true;
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let traffic = current_traffic.get_and_update();
        if traffic == Traffic::Cut || (has_lost_data && !is_swallowed(traffic)) {
            return Ok(());
        }
        let is_frozen = traffic == Traffic::Freeze;
        let due = pending.front().map(|(due, _)| *due).filter(|_| !is_frozen);
        tokio::select! {
            changed = current_traffic.changed() => if changed.is_err() { return Ok(()) },
            count = from.read(&mut buffer), if is_open && !is_frozen && pending.len() < CHUNKS => {
                let count = count?;
                let delay = match traffic {
                    Traffic::Delay(delay) => delay,
                    _ => Duration::ZERO,
                };
                is_open = count > 0;
                if is_swallowed(traffic) {
                    has_lost_data = true;
                } else {
                    let chunk = buffer.get(..count).unwrap_or_default().to_vec();
                    pending.push_back((Instant::now() + delay, chunk));
                }
            }
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                let chunk = pending.pop_front().map(|(_, chunk)| chunk).unwrap_or_default();
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

    /// Returns a proxied connection to an echo server, with the sender of its traffic.
    async fn echo_connection() -> (watch::Sender<Traffic>, TcpStream) {
        let [echo, proxy] = [
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
        ];
        let server = echo.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = echo.accept().await.unwrap();
            let (mut read, mut write) = stream.split();
            drop(tokio::io::copy(&mut read, &mut write).await);
        });
        let (traffic, current_traffic) = watch::channel(Traffic::Pass);
        let client = TcpStream::connect(proxy.local_addr().unwrap())
            .await
            .unwrap();
        let (accepted, _) = proxy.accept().await.unwrap();
        tokio::spawn(forward(accepted, server, current_traffic));
        (traffic, client)
    }

    async fn echoes(client: &mut TcpStream, word: &[u8; 4]) -> io::Result<bool> {
        client.write_all(word).await?;
        let mut received = [0; 4];
        client.read_exact(&mut received).await?;
        Ok(received == *word)
    }

    #[tokio::test]
    async fn passed_delayed_and_frozen_traffic_is_delivered() {
        let (traffic, mut client) = echo_connection().await;
        assert!(echoes(&mut client, b"pass").await.unwrap());
        traffic.send_replace(Traffic::Delay(Duration::from_millis(50)));
        assert!(echoes(&mut client, b"late").await.unwrap());
        traffic.send_replace(Traffic::Freeze);
        client.write_all(b"held").await.unwrap();
        traffic.send_replace(Traffic::Pass);
        let mut received = [0; 4];
        client.read_exact(&mut received).await.unwrap();
        assert_eq!(&received, b"held");
    }

    #[tokio::test]
    async fn cut_or_lossy_connection_is_reset() {
        let (traffic, mut client) = echo_connection().await;
        traffic.send_replace(Traffic::Cut);
        assert!(echoes(&mut client, b"gone").await.is_err());

        let (traffic, mut client) = echo_connection().await;
        let swallow = |there, back| Traffic::Swallow { there, back };
        traffic.send_replace(swallow(false, true));
        client.write_all(b"lost").await.unwrap();
        // The direction to the server still works. Only the echo is lost.
        tokio::time::timeout(Duration::from_millis(100), client.readable())
            .await
            .unwrap_err();
        traffic.send_replace(Traffic::Pass);
        assert!(echoes(&mut client, b"more").await.is_err());
    }
}
