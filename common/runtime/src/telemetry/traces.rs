//! Exports traces over OTLP/gRPC to a collector if an endpoint is configured.
//!
//! Besides the endpoint, only these variables of the OpenTelemetry specification have an effect:
//! `OTEL_SDK_DISABLED`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`,
//! `OTEL_EXPORTER_OTLP_TIMEOUT`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*` except the timeout, `OTEL_SERVICE_NAME`,
//! `OTEL_RESOURCE_ATTRIBUTES`.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fmt, io};

use crate::telemetry::ExtraLayer;
use http::Uri;
use opentelemetry::trace::{Status, TracerProvider as _};
use opentelemetry::{KeyValue, Value};
use opentelemetry_otlp::{
    ExporterBuildError, RetryPolicy, WithExportConfig as _, WithTonicConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use tokio::runtime::{Handle, Runtime};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tracing::{Level, Metadata};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, filter_fn};

/// Exported spans: work that ends. The other spans belong to sessions and reconcilers and last as long as
/// these.
const EXPORTED_SPANS: [&str; 5] = ["chart", "helm", "home", "placement", "work"];

/// Name of the outcome attribute, and its value on success.
const OUTCOME: (&str, &str) = ("outcome", "ok");

/// Time limit of an export with its retries, unless a variable sets another, and of a single attempt.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(30);
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest pause between two attempts, which allows about six attempts per export.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);
const RETRIES_MAX: usize = 10;
/// Interval and timeout of HTTP/2 PING. Detects within 20 s that a collector's node has vanished.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Time limit of the last export at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum length of a text attribute. A collector accepts 4 MiB per request by default, which is 512 spans
/// with a few such texts each.
const ATTRIBUTE_MAX: usize = 1024;

const DISABLED: &str = "OTEL_SDK_DISABLED";
const CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CERTIFICATE";
const TIMEOUT: &str = "OTEL_EXPORTER_OTLP_TIMEOUT";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";

/// URL of a collector with OTLP/gRPC: `http://HOST:PORT` or `https://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpEndpoint(Uri);

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why an endpoint is invalid. Omits the input, because it may contain a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEndpoint {
    #[error("no address of a collector: write http://HOST:4317, or https:// for TLS")]
    Form,
    #[error("a collector's address has no user and password: set OTEL_EXPORTER_OTLP_HEADERS")]
    Credentials,
}

impl FromStr for OtlpEndpoint {
    type Err = InvalidEndpoint;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let uri: Uri = text.trim().parse().map_err(|_| InvalidEndpoint::Form)?;
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        if authority.contains('@') {
            return Err(InvalidEndpoint::Credentials);
        }
        let has_known_scheme = matches!(uri.scheme_str(), Some("http" | "https"));
        if !has_known_scheme || authority.is_empty() || uri.path() != "/" || uri.query().is_some() {
            return Err(InvalidEndpoint::Form);
        }
        Ok(Self(uri))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    #[error("reading {}, which {CERTIFICATE} names, failed", path.display())]
    Certificate {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}, which {CERTIFICATE} names, has no certificate in PEM", path.display())]
    NoCertificate { path: PathBuf },
    #[error(
        "{SAMPLER} is not a sampler, or {SAMPLER_ARG} is not a number from 0 to 1; set always_on, always_off or traceidratio, with or without the prefix parentbased_"
    )]
    Sampler,
    #[error("{TIMEOUT} is not a number of milliseconds from 1 to 600000")]
    Timeout,
    #[error("preparing the connection to the collector {endpoint} failed")]
    Connection {
        endpoint: OtlpEndpoint,
        #[source]
        source: tonic::transport::Error,
    },
    #[error("preparing what sends traces to {endpoint} failed")]
    Exporter {
        endpoint: OtlpEndpoint,
        #[source]
        source: ExporterBuildError,
    },
    #[error("starting the thread that sends traces failed")]
    Thread(#[source] io::Error),
}

/// Exports traces until it is dropped. The drop exports the remaining ones for at most 3 s.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    /// A separate runtime, which keeps exporting while the process's other threads are busy or have stopped.
    runtime: Option<Runtime>,
}

impl Traces {
    /// Starts the export. The collector need not be reachable, because the queue is bounded. Returns `None`
    /// if a variable disables traces, regardless of the endpoint.
    ///
    /// # Errors
    /// Returns an error if a certificate is not readable, a sampler is invalid, or no thread can be started.
    pub fn start(
        endpoint: &OtlpEndpoint,
        program: &'static str,
        replica: Option<&str>,
    ) -> Result<Option<(Self, ExtraLayer)>, TracesError> {
        if variable(DISABLED).is_some_and(|disabled| disabled.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        if !is_valid_sampler(
            variable(SAMPLER).as_deref(),
            variable(SAMPLER_ARG).as_deref(),
        ) {
            return Err(TracesError::Sampler);
        }
        let timeout = export_timeout(variable(TIMEOUT).as_deref()).ok_or(TracesError::Timeout)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("traces")
            .enable_all()
            .build()
            .map_err(TracesError::Thread)?;
        let channel = {
            let _guard = runtime.enter();
            channel(endpoint)?
        };
        let retry_policy = RetryPolicy::recommended()
            .with_max_retries(RETRIES_MAX)
            .with_max_delay(RETRY_PAUSE_MAX);
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_channel(channel)
            .with_timeout(timeout)
            .with_retry_policy(retry_policy)
            .build()
            .map_err(|source| TracesError::Exporter {
                endpoint: endpoint.clone(),
                source,
            })?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource(program, replica))
            .with_batch_exporter(LoggingExporter {
                endpoint: endpoint.clone(),
                is_unavailable: AtomicBool::new(false),
                timeout,
                runtime: runtime.handle().clone(),
                exporter,
            })
            .build();
        let layer = layer(&provider, program);
        let traces = Self {
            provider,
            runtime: Some(runtime),
        };
        Ok(Some((traces, layer)))
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT) {
            tracing::debug!(%error, "the last traces were not sent");
        }
        // A DNS lookup may take longer than the shutdown.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Returns a variable. The specification treats an empty one as unset.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// Returns whether the sampler is valid. The library silently replaces an invalid one with its default.
fn is_valid_sampler(name: Option<&str>, argument: Option<&str>) -> bool {
    let Some(name) = name else {
        return true;
    };
    match name.strip_prefix("parentbased_").unwrap_or(name) {
        "always_on" | "always_off" => true,
        "traceidratio" => argument
            .and_then(|argument| argument.parse::<f64>().ok())
            .is_some_and(|ratio| (0.0..=1.0).contains(&ratio)),
        _ => false,
    }
}

fn export_timeout(text: Option<&str>) -> Option<Duration> {
    match text {
        None => Some(EXPORT_TIMEOUT),
        Some(text) => {
            let number: u64 = text.trim().parse().ok()?;
            (1..=600_000)
                .contains(&number)
                .then(|| Duration::from_millis(number))
        }
    }
}

fn channel(endpoint: &OtlpEndpoint) -> Result<Channel, TracesError> {
    let connection_error = |source| TracesError::Connection {
        endpoint: endpoint.clone(),
        source,
    };
    let mut channel = Endpoint::from(endpoint.0.clone())
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(ATTEMPT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_INTERVAL);
    if endpoint.0.scheme_str() == Some("https") {
        let tls = ClientTlsConfig::new().timeout(CONNECT_TIMEOUT);
        let tls = match variable(CERTIFICATE).map(PathBuf::from) {
            None => tls.with_native_roots(),
            Some(path) => tls.ca_certificate(certificate(path)?),
        };
        channel = channel.tls_config(tls).map_err(connection_error)?;
    }
    Ok(channel.connect_lazy())
}

fn certificate(path: PathBuf) -> Result<Certificate, TracesError> {
    match std::fs::read(&path) {
        Ok(pem) if CertificateDer::from_pem_slice(&pem).is_ok() => Ok(Certificate::from_pem(pem)),
        Ok(_) => Err(TracesError::NoCertificate { path }),
        Err(source) => Err(TracesError::Certificate { path, source }),
    }
}

fn resource(program: &'static str, replica: Option<&str>) -> Resource {
    let name = variable(SERVICE_NAME);
    let replica = replica.map(|replica| KeyValue::new("service.instance.id", replica.to_owned()));
    Resource::builder_empty()
        .with_service_name(program)
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_attributes(replica)
        .with_detector(Box::new(EnvResourceDetector::new()))
        .with_attributes(name.map(|name| KeyValue::new("service.name", name)))
        .build()
}

fn layer(provider: &SdkTracerProvider, program: &'static str) -> ExtraLayer {
    tracing_opentelemetry::layer()
        .with_tracer(provider.tracer(program))
        // A span's parent is the nearest enclosing span that is exported.
        .with_context_activation(false)
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_tracked_inactivity(false)
        .with_filter(filter_fn(is_exported).with_max_level_hint(LevelFilter::INFO))
        .boxed()
}

/// Exports the log events of the default log level.
fn is_exported(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("krypton")
        && if metadata.is_span() {
            EXPORTED_SPANS.contains(&metadata.name())
        } else {
            *metadata.level() <= Level::INFO
        }
}

/// Logs once when the collector becomes unavailable and once when it is back.
#[derive(Debug)]
struct LoggingExporter<E> {
    endpoint: OtlpEndpoint,
    is_unavailable: AtomicBool,
    timeout: Duration,
    runtime: Handle,
    exporter: E,
}

impl<E: SpanExporter> SpanExporter for LoggingExporter<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let batch = batch.into_iter().map(with_status).collect();
        let result = {
            let _guard = self.runtime.enter();
            tokio::time::timeout(self.timeout, self.exporter.export(batch))
        };
        let result = result
            .await
            .unwrap_or(Err(OTelSdkError::Timeout(self.timeout)));
        let was_unavailable = self.is_unavailable.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !was_unavailable => {
                tracing::warn!(endpoint = %self.endpoint, %error, "failed to send traces; dropping spans");
            }
            Ok(()) if was_unavailable => {
                tracing::info!(endpoint = %self.endpoint, "traces are sent again");
            }
            _ => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Sets the span's status from its outcome, because users search for spans with errors. Truncates long texts.
fn with_status(mut span: SpanData) -> SpanData {
    let (name, success) = OUTCOME;
    for attribute in &mut span.attributes {
        shorten(attribute);
        if attribute.key.as_str() == name {
            let outcome = attribute.value.to_string();
            span.status = if outcome == success {
                Status::Ok
            } else {
                Status::error(outcome)
            };
        }
    }
    for event in &mut span.events.events {
        event.attributes.iter_mut().for_each(shorten);
    }
    span
}

fn shorten(attribute: &mut KeyValue) {
    if let Value::String(text) = &mut attribute.value
        && text.as_str().len() > ATTRIBUTE_MAX
    {
        let end = text.as_str().floor_char_boundary(ATTRIBUTE_MAX);
        let shortened = text.as_str().get(..end).unwrap_or_default();
        *text = format!("{shortened}…").into();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use opentelemetry::trace::SpanId;
    use parking_lot::Mutex;
    use tracing::field::Empty;
    use tracing_subscriber::filter::dynamic_filter_fn;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[test]
    fn otlp_endpoint_needs_scheme_and_host_without_password() {
        for good in [
            "http://otel:4317",
            "https://collector.example",
            " http://[::1]:4317/ ",
        ] {
            assert!(good.parse::<OtlpEndpoint>().is_ok(), "{good}");
        }
        let cases = [
            ("", InvalidEndpoint::Form),
            ("otel:4317", InvalidEndpoint::Form),
            ("grpc://otel:4317", InvalidEndpoint::Form),
            ("http://otel:4318/v1/traces", InvalidEndpoint::Form),
            ("http://otel:4317/?a=b", InvalidEndpoint::Form),
            ("http://me:pass@otel:4317", InvalidEndpoint::Credentials),
        ];
        for (bad, reason) in cases {
            assert_eq!(bad.parse::<OtlpEndpoint>(), Err(reason), "{bad}");
        }
    }

    #[test]
    fn unsupported_sampler_is_rejected() {
        let cases = [
            (None, None, true),
            (Some("always_off"), None, true),
            (Some("parentbased_always_on"), None, true),
            (Some("traceidratio"), Some("0.1"), true),
            (Some("parentbased_traceidratio"), Some("1"), true),
            (Some("traceidratio"), None, false),
            (Some("traceidratio"), Some("10%"), false),
            (Some("traceidratio"), Some("2"), false),
            (Some("jaeger_remote"), None, false),
        ];
        for (name, argument, good) in cases {
            assert_eq!(
                is_valid_sampler(name, argument),
                good,
                "{name:?} {argument:?}"
            );
        }
    }

    #[test]
    fn export_timeout_defaults_to_thirty_seconds() {
        assert_eq!(export_timeout(None), Some(EXPORT_TIMEOUT));
        assert_eq!(
            export_timeout(Some("1500")),
            Some(Duration::from_millis(1500))
        );
        for bad in ["0", "10s", "-1", "600001"] {
            assert_eq!(export_timeout(Some(bad)), None, "{bad}");
        }
    }

    #[test]
    fn a_file_without_a_certificate_is_refused() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("ca.pem");
        let none = certificate(path.clone());
        assert!(matches!(none, Err(TracesError::Certificate { .. })));
        std::fs::write(&path, "not PEM").unwrap();
        let none = certificate(path);
        assert!(matches!(none, Err(TracesError::NoCertificate { .. })));
    }

    /// Replaces a collector.
    #[derive(Clone, Debug, Default)]
    struct MemoryExporter {
        spans: Arc<Mutex<Vec<SpanData>>>,
        is_unavailable: Arc<AtomicBool>,
    }

    impl SpanExporter for MemoryExporter {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            if self.is_unavailable.load(Ordering::Relaxed) {
                return Err(OTelSdkError::InternalFailure("away".to_owned()));
            }
            self.spans.lock().extend(batch);
            Ok(())
        }
    }

    fn logging_exporter(
        exporter: &MemoryExporter,
        runtime: &Runtime,
    ) -> LoggingExporter<MemoryExporter> {
        LoggingExporter {
            endpoint: "http://otel:4317".parse().unwrap(),
            is_unavailable: AtomicBool::new(false),
            timeout: EXPORT_TIMEOUT,
            runtime: runtime.handle().clone(),
            exporter: exporter.clone(),
        }
    }

    /// Returns the exported spans by name.
    fn exported_spans(run: impl FnOnce()) -> BTreeMap<String, SpanData> {
        let memory = MemoryExporter::default();
        let runtime = Runtime::new().unwrap();
        let provider = SdkTracerProvider::builder()
            .with_simple_exporter(logging_exporter(&memory, &runtime))
            .build();
        let subscriber =
            tracing_subscriber::registry().with(vec![layer(&provider, "krypton-agent")]);
        tracing::subscriber::with_default(subscriber, run);
        let spans = memory.spans.lock().clone();
        let count = spans.len();
        let by_name: BTreeMap<_, _> = spans
            .into_iter()
            .map(|span| (span.name.to_string(), span))
            .collect();
        assert_eq!(by_name.len(), count);
        by_name
    }

    fn attributes(span: &SpanData) -> BTreeMap<&str, String> {
        let each = span.attributes.iter();
        each.map(|attribute| (attribute.key.as_str(), attribute.value.to_string()))
            .collect()
    }

    #[test]
    fn ended_work_span_has_nearest_parent_and_outcome() {
        let spans = exported_spans(|| {
            let _reconciler = tracing::error_span!("reconciler", member = "edge-1").entered();
            let work =
                tracing::error_span!("work", tenant = "a/b", generation = 3_i64, outcome = Empty);
            let work_guard = work.clone().entered();
            let session = tracing::error_span!("session").entered();
            let helm = tracing::error_span!("helm", verb = "install", outcome = Empty).entered();
            tracing::info!(chart = "c".repeat(5000), "said");
            tracing::debug!("a detail");
            helm.record("outcome", "failed");
            drop((helm, session));
            work.record("outcome", "ok");
            drop((work_guard, work));
            drop(tracing::error_span!("home", tenant = "a/b"));
            drop(tracing::error_span!(target: "kube", "helm"));
        });
        let names: Vec<&str> = spans.keys().map(String::as_str).collect();
        assert_eq!(names, ["helm", "home", "work"]);
        let (helm, home, work) = (&spans["helm"], &spans["home"], &spans["work"]);
        assert_eq!(work.parent_span_id, SpanId::INVALID);
        assert_eq!(helm.parent_span_id, work.span_context.span_id());
        assert_eq!(helm.span_context.trace_id(), work.span_context.trace_id());
        assert_ne!(home.span_context.trace_id(), work.span_context.trace_id());
        assert_eq!(work.status, Status::Ok);
        assert_eq!(helm.status, Status::error("failed"));
        assert_eq!(home.status, Status::Unset);
        let work_attributes = attributes(work);
        assert_eq!(work_attributes["tenant"], "a/b");
        assert_eq!(work_attributes["generation"], "3");
        let events: Vec<_> = helm.events.iter().map(|event| &*event.name).collect();
        assert_eq!(events, ["said"]);
        let long = |attribute: &KeyValue| attribute.value.as_str().len();
        let longest = helm.events[0].attributes.iter().map(long).max();
        assert_eq!(longest, Some(ATTRIBUTE_MAX + "…".len()));
        assert!(work.events.is_empty());
    }

    #[test]
    fn collector_outage_and_recovery_are_each_logged_once() {
        let memory = MemoryExporter::default();
        let runtime = Runtime::new().unwrap();
        let exporter = logging_exporter(&memory, &runtime);
        let (lines, subscriber) = level_subscriber();
        tracing::subscriber::with_default(subscriber, || {
            for is_unavailable in [false, true, true, false, false, true] {
                memory
                    .is_unavailable
                    .store(is_unavailable, Ordering::Relaxed);
                let result = futures::executor::block_on(exporter.export(Vec::new()));
                assert_eq!(result.is_err(), is_unavailable);
            }
        });
        assert_eq!(*lines.lock(), [Level::WARN, Level::INFO, Level::WARN]);
    }

    type Levels = Arc<Mutex<Vec<Level>>>;

    /// Returns a subscriber that counts the levels of log events.
    fn level_subscriber() -> (Levels, impl tracing::Subscriber + Send + Sync) {
        let lines = Levels::default();
        let to = Arc::clone(&lines);
        let count = dynamic_filter_fn(move |metadata, _| {
            if metadata.is_event() {
                to.lock().push(*metadata.level());
            }
            false
        });
        let layer = tracing_subscriber::fmt::layer().with_writer(io::sink);
        (
            lines,
            tracing_subscriber::registry().with(layer.with_filter(count)),
        )
    }
}
