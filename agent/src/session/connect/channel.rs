//! Wraps a TLS stream in a tonic channel and records the TLS alert that ends it.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use krypton_runtime::net::Stream;
use parking_lot::Mutex;
use rustls::AlertDescription;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint, Error};
use tower::service_fn;

/// Interval and timeout of HTTP/2 PINGs, which detect a vanished peer within 20 s.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Capacity for requests that wait for the connection. A session uses one stream, a renewal and a few charts.
const REQUESTS_MAX: usize = 16;
/// Placeholder that tonic requires; the stream already determines the destination.
const PLACEHOLDER_URI: &str = "http://hub";

/// The TLS alert that ended the connection, if any.
pub(super) type ReceivedAlert = Arc<OnceLock<AlertDescription>>;

/// Creates a channel over this one stream. It does not reconnect.
pub(super) async fn channel(stream: TlsStream<Stream>) -> Result<(Channel, ReceivedAlert), Error> {
    let received_alert = ReceivedAlert::default();
    let recorder = AlertRecorder {
        stream,
        received_alert: Arc::clone(&received_alert),
    };
    let unused_stream = Mutex::new(Some(TokioIo::new(recorder)));
    let connector = service_fn(move |_| {
        let stream = unused_stream.lock().take();
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    let channel = Endpoint::from_static(PLACEHOLDER_URI)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_INTERVAL)
        .keep_alive_while_idle(true)
        .buffer_size(REQUESTS_MAX)
        .connect_with_connector(connector)
        .await?;
    Ok((channel, received_alert))
}

/// Records the alert of a failed read, because tonic reports only that the stream ended.
struct AlertRecorder {
    stream: TlsStream<Stream>,
    received_alert: ReceivedAlert,
}

impl AsyncRead for AlertRecorder {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        if let Poll::Ready(Err(error)) = &result
            && let Some(alert) = alert(error)
        {
            self.received_alert.get_or_init(|| alert);
        }
        result
    }
}

impl AsyncWrite for AlertRecorder {
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
