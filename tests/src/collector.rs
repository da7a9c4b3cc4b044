//! A stand-in for an OpenTelemetry collector that receives spans by OTLP over gRPC and stores them.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use anyhow::{Context, Result};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{AnyValue, KeyValue, any_value::Value},
    trace::v1::Span,
};
use parking_lot::Mutex;
use rcgen::{CertificateParams, KeyPair};
use tempfile::TempDir;
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{
    Request, Response, Status,
    transport::{Identity, Server, ServerTlsConfig},
};

use crate::port::Port;

/// A received span, decoded.
#[derive(Clone, Debug)]
pub struct ReceivedSpan {
    /// Name of the program that sent the span.
    pub service: String,
    pub trace: Vec<u8>,
    pub id: Vec<u8>,
    /// Empty for the root span of a trace.
    pub parent: Vec<u8>,
    pub name: String,
    pub attributes: BTreeMap<String, String>,
    /// 0: unset, 1: ok, 2: error.
    pub status: i32,
    /// Names of the events within the span.
    pub events: Vec<String>,
}

impl ReceivedSpan {
    /// Returns the attribute of that name, or an empty string.
    pub fn attribute(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }
}

type Spans = Arc<Mutex<Vec<ReceivedSpan>>>;

/// Receives spans until it is stopped or dropped.
#[derive(Debug)]
pub struct Collector {
    port: Port,
    spans: Spans,
    certificate: Certificate,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

#[derive(Debug)]
struct Certificate {
    pem: String,
    key: String,
    _folder: TempDir,
    file: PathBuf,
}

impl Certificate {
    fn make() -> Result<Self> {
        let key = KeyPair::generate().context("generating a key")?;
        let own = CertificateParams::new(vec!["127.0.0.1".to_owned()])
            .and_then(|params| params.self_signed(&key))
            .context("generating a certificate")?;
        let folder = TempDir::with_prefix("krypton-collector-").context("creating a folder")?;
        let file = folder.path().join("ca.pem");
        std::fs::write(&file, own.pem()).context("writing a certificate")?;
        Ok(Self {
            pem: own.pem(),
            key: key.serialize_pem(),
            _folder: folder,
            file,
        })
    }
}

impl Collector {
    /// Starts a collector with TLS.
    pub async fn start() -> Result<Self> {
        crate::install_tls_provider();
        let mut collector = Self {
            port: Port::reserve()?,
            spans: Spans::default(),
            certificate: Certificate::make()?,
            running: None,
        };
        collector.serve().await?;
        Ok(collector)
    }

    /// Serves again after `stop`.
    pub async fn serve(&mut self) -> Result<()> {
        self.stop().await;
        let identity = Identity::from_pem(&self.certificate.pem, &self.certificate.key);
        let mut server = Server::builder()
            .tls_config(ServerTlsConfig::new().identity(identity))
            .context("setting up TLS")?;
        let listener = self.port.listen()?;
        let listener = TcpListener::from_std(listener).context("listening")?;
        let service = TraceServiceServer::new(SpanReceiver(Arc::clone(&self.spans)));
        let (stop, stopped) = oneshot::channel();
        let serving = server.add_service(service).serve_with_incoming_shutdown(
            TcpListenerStream::new(listener),
            async move {
                // An error means that the sender was dropped, which also stops the server.
                drop(stopped.await);
            },
        );
        let serving = tokio::spawn(async move {
            if let Err(error) = serving.await {
                eprintln!("the collector has ended: {error}");
            }
        });
        self.running = Some((stop, serving));
        Ok(())
    }

    /// Environment variables that make a process export to this collector, shortly after each span and with a short
    /// timeout.
    pub fn env(&self) -> Vec<(String, String)> {
        let endpoint = format!("https://{}", self.port.address());
        let file = self.certificate.file.display().to_string();
        vec![
            ("OTEL_EXPORTER_OTLP_ENDPOINT".to_owned(), endpoint),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE".to_owned(), file),
            ("OTEL_EXPORTER_OTLP_TIMEOUT".to_owned(), "1000".to_owned()),
            ("OTEL_BSP_SCHEDULE_DELAY".to_owned(), "100".to_owned()),
        ]
    }

    /// Returns all received spans.
    pub fn spans(&self) -> Vec<ReceivedSpan> {
        self.spans.lock().clone()
    }

    /// Stops the collector: closes its connections and refuses new ones.
    pub async fn stop(&mut self) {
        if let Some((stop, serving)) = self.running.take() {
            drop(stop);
            // The task has already printed its error.
            drop(serving.await);
        }
    }
}

struct SpanReceiver(Spans);

#[tonic::async_trait]
impl TraceService for SpanReceiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock();
        for batch in request.into_inner().resource_spans {
            let resource = batch.resource.unwrap_or_default();
            let resource_attributes = attributes(resource.attributes);
            let service = resource_attributes
                .get("service.name")
                .cloned()
                .unwrap_or_default();
            let each = batch.scope_spans.into_iter().flat_map(|scope| scope.spans);
            spans.extend(each.map(|span| received_span(&service, span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn received_span(service: &str, span: Span) -> ReceivedSpan {
    let events = span.events.into_iter().map(|event| {
        let fields = attributes(event.attributes);
        format!("{} {fields:?}", event.name)
    });
    ReceivedSpan {
        service: service.to_owned(),
        trace: span.trace_id,
        id: span.span_id,
        parent: span.parent_span_id,
        name: span.name,
        attributes: attributes(span.attributes),
        status: span.status.map_or(0, |status| status.code),
        events: events.collect(),
    }
}

fn attributes(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let word = |value: Option<AnyValue>| match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    };
    let each = attributes.into_iter();
    each.map(|one| (one.key, word(one.value))).collect()
}
