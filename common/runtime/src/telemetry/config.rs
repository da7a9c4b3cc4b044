//! What a process tells of itself from its start on: its log and, where they are wanted, traces and the console.

use crate::telemetry::{self, Beside, Log, LogFormat, TelemetryError};

use crate::telemetry::traces::{NoEndpoint, OtlpEndpoint, Traces, TracesError};

/// What is wanted of it.
#[derive(Clone, Debug)]
pub struct TelemetryConfig<'a> {
    pub program: &'static str,
    /// This one of several, where it is known.
    pub replica: Option<&'a str>,
    pub format: LogFormat,
    /// Unless `RUST_LOG` says otherwise.
    pub filter: &'a str,
    pub otlp: Option<OtlpEndpoint>,
}

#[derive(Debug, thiserror::Error)]
pub enum TellingError {
    #[error("--otlp-endpoint, or OTEL_EXPORTER_OTLP_ENDPOINT, is not understood")]
    Endpoint(#[from] NoEndpoint),
    #[error(transparent)]
    Log(#[from] TelemetryError),
    #[error(transparent)]
    Traces(#[from] TracesError),
}

impl TelemetryConfig<'_> {
    /// Once per process, after its TLS provider was installed. The traces end when they are dropped.
    ///
    /// # Errors
    /// When what is wanted is wrong.
    pub fn start(self) -> Result<(Log, Option<Traces>), TellingError> {
        let traced = self
            .otlp
            .as_ref()
            .map(|endpoint| Traces::start(endpoint, self.program, self.replica))
            .transpose()?;
        let (traces, layer) = traced.flatten().unzip();
        let beside: Vec<Beside> = layer.into_iter().chain(console()).collect();
        let log = telemetry::init(self.format, self.filter, beside)?;
        log.process.put("program", self.program);
        if let Some(replica) = self.replica {
            log.process.put("replica", replica);
        }
        Ok((log, traces))
    }
}

/// For tokio-console, on loopback (`TOKIO_CONSOLE_BIND`).
#[cfg(feature = "console")]
fn console() -> Option<Beside> {
    use tracing_subscriber::Layer as _;
    let console = console_subscriber::ConsoleLayer::builder().with_default_env();
    Some(console.spawn().boxed())
}

#[cfg(not(feature = "console"))]
fn console() -> Option<Beside> {
    None
}
