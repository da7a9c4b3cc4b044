//! From a TLS stream to tonic's channel. tonic takes streams of hyper's own traits, which no dependency
//! of ours names; but it can connect to a Unix socket, whose other end is ours.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustls::AlertDescription;
use thiserror::Error;
use tokio::io::{AsyncWriteExt, copy, split};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};

/// HTTP/2 PING, answered within as long: a peer that has vanished is noticed within 20 s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// For what is still on its way when one side has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Requests that wait for the connection: a session has a stream, a renewal and a few charts.
const REQUESTS: usize = 16;

/// The alert that ended the connection, once there was one.
pub(super) type Refusal = Arc<OnceLock<AlertDescription>>;

#[derive(Debug, Error)]
pub enum BridgeError {
    #[error(
        "a socket in the folder for temporary files cannot be made; name a writable one in TMPDIR"
    )]
    Socket(#[source] io::Error),
    #[error("HTTP/2 could not be set up")]
    Http2(#[source] tonic::transport::Error),
}

/// Ends with either side.
pub(super) async fn channel(
    stream: TlsStream<TcpStream>,
) -> Result<(Channel, Refusal), BridgeError> {
    // Nobody else may enter the folder, and it is gone once both ends are there.
    let folder = tempfile::Builder::new()
        .prefix("krypton-hub-")
        .tempdir()
        .map_err(BridgeError::Socket)?;
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).map_err(BridgeError::Socket)?;
    let channel = Endpoint::from_shared(format!("unix:{}", path.display()))
        .map_err(BridgeError::Http2)?
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .buffer_size(REQUESTS)
        .connect()
        .await
        .map_err(BridgeError::Http2)?;
    let (near, _) = listener.accept().await.map_err(BridgeError::Socket)?;
    let refusal = Refusal::default();
    tokio::spawn(pump(near, stream, Arc::clone(&refusal)));
    Ok((channel, refusal))
}

async fn pump(near: UnixStream, far: TlsStream<TcpStream>, refusal: Refusal) {
    let (mut far_read, mut far_write) = split(far);
    let (mut near_read, mut near_write) = near.into_split();
    let down = async {
        let ended = copy(&mut far_read, &mut near_write).await;
        if let Some(alert) = ended.err().as_ref().and_then(alert) {
            // Known before the near end closes, and with it every call.
            refusal.get_or_init(|| alert);
        }
    };
    let mut down = std::pin::pin!(down);
    let up = copy(&mut near_read, &mut far_write);
    tokio::select! {
        () = &mut down => {}
        ended = up => {
            let last = async {
                match ended {
                    Ok(_) => drop(far_write.shutdown().await),
                    // A hub that is gone has said why in what is not read yet.
                    Err(_) => down.await,
                }
            };
            drop(tokio::time::timeout(LAST_WORDS, last).await);
        }
    }
}

fn alert(error: &io::Error) -> Option<AlertDescription> {
    match error.get_ref()?.downcast_ref::<rustls::Error>()? {
        rustls::Error::AlertReceived(alert) => Some(*alert),
        _ => None,
    }
}
