//! Configuration of a process's telemetry: logs and optional traces.

use crate::telemetry::{self, Log, LogFormat, LogInitError};

use crate::telemetry::traces::{OtlpEndpoint, Traces, TracesError};

/// Settings of the telemetry.
#[derive(Clone, Debug)]
pub struct TelemetryConfig<'a> {
    pub program: &'static str,
    /// Name of this replica, if known.
    pub replica: Option<&'a str>,
    pub format: LogFormat,
    /// Default log filter. `RUST_LOG` overrides it.
    pub filter: &'a str,
    pub otlp: Option<OtlpEndpoint>,
}

#[derive(Debug, thiserror::Error)]
pub enum TelemetryStartError {
    #[error(transparent)]
    Log(#[from] LogInitError),
    #[error(transparent)]
    Traces(#[from] TracesError),
}

impl TelemetryConfig<'_> {
    /// Starts the telemetry. Call it once per process, after the TLS provider is installed. Dropping the traces stops
    /// them.
    ///
    /// # Errors
    /// If a setting is invalid.
    pub fn start(self) -> Result<(Log, Option<Traces>), TelemetryStartError> {
        let traces_and_layer = self
            .otlp
            .as_ref()
            .map(|endpoint| Traces::start(endpoint, self.program, self.replica))
            .transpose()?;
        let (traces, layer) = traces_and_layer.flatten().unzip();
        let log = telemetry::init(self.format, self.filter, layer)?;
        log.process.set("program", self.program);
        if let Some(replica) = self.replica {
            log.process.set("replica", replica);
        }
        Ok((log, traces))
    }
}
