//! Signals that end a process.

use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

#[derive(Debug, Error)]
#[error("listening for {name} failed")]
pub struct SignalError {
    name: &'static str,
    #[source]
    source: std::io::Error,
}

/// Returns a token that SIGTERM or SIGINT cancels. A second signal exits the process immediately. The next start
/// repairs releases that Helm leaves incomplete.
///
/// Must be called inside a tokio runtime.
pub fn stop_on_signal() -> Result<CancellationToken, SignalError> {
    let listen = |kind, name| signal(kind).map_err(|source| SignalError { name, source });
    let mut term = listen(SignalKind::terminate(), "SIGTERM")?;
    let mut int = listen(SignalKind::interrupt(), "SIGINT")?;
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        stopping.cancel();
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        tracing::warn!("second signal: exiting immediately");
        std::process::exit(1);
    });
    Ok(stop)
}
