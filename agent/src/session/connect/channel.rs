//! Wraps a TLS stream in a tonic channel and records the TLS alert that ends it.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use krypton_runtime::net::Stream;
use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;

/// Interval and timeout of HTTP/2 PINGs, which detect a vanished peer within 20 s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Capacity for requests that wait for the connection. A session uses one stream, a renewal and a few charts.
const REQUESTS: usize = 16;
/// Placeholder that tonic requires; the stream already determines the destination.
const ANY: &str = "http://hub";

/// The TLS alert that ended the connection, if any.
pub(super) type Refusal = Arc<OnceLock<AlertDescription>>;

/// Creates a channel over this one stream. It does not reconnect.
pub(super) async fn channel(stream: TlsStream<Stream>) -> Result<(Channel, Refusal), Error> {
    let refusal = Refusal::default();
    let watched = Watched {
        stream,
        refusal: Arc::clone(&refusal),
    };
    let once = Mutex::new(Some(TokioIo::new(watched)));
    let connector = service_fn(move |_| {
        let stream = once.lock().unwrap_or_else(PoisonError::into_inner).take();
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    let channel = Endpoint::from_static(ANY)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .buffer_size(REQUESTS)
        .connect_with_connector(connector)
        .await?;
    Ok((channel, refusal))
}

/// Records the alert of a failed read, because tonic reports only that the stream ended.
struct Watched {
    stream: TlsStream<Stream>,
    refusal: Refusal,
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if let Poll::Ready(Err(error)) = &read
            && let Some(alert) = alert(error)
        {
            self.refusal.get_or_init(|| alert);
        }
        read
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

fn alert(error: &io::Error) -> Option<AlertDescription> {
    match error.get_ref()?.downcast_ref::<rustls::Error>()? {
        rustls::Error::AlertReceived(alert) => Some(*alert),
        _ => None,
    }
}
