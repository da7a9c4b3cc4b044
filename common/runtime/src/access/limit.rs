//! Limits the responses of an untrusted API server: bytes, nesting, line length, and time.
//!
//! kube collects each body in memory and reads each line of a watch to its end. Without limits, a server with
//! an infinite response would use up the memory of the whole process.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{Request, Response};
use hyper::body::{Body, Bytes, Frame, SizeHint};
use thiserror::Error;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};
use tower::{BoxError, Layer, Service};

use crate::bound::ExceededBound;

/// Limits for the responses of one API server.
#[derive(Clone, Copy, Debug)]
pub struct ResponseLimits {
    /// Maximum bytes of a response. A page holds 50 objects.
    pub body: usize,
    /// Maximum bytes of an error response.
    pub error: usize,
    /// Maximum bytes of a watch event. An API server accepts objects of up to 3 MiB.
    pub event: usize,
    /// Maximum number of objects and lists in a response or event. An empty one takes 200 times its bytes
    /// when decoded.
    pub nested: usize,
    /// Maximum bytes of all responses of the server that are in progress.
    pub in_flight: usize,
    /// Longest pause within a response other than a watch.
    pub idle: Duration,
    /// Time limit from the request to the end of a response, or to the start of a watch. An API server gives
    /// up after 60 s.
    pub total: Duration,
    /// Maximum duration of a watch. The client requests 290 s.
    pub watch: Duration,
}

impl Default for ResponseLimits {
    fn default() -> Self {
        Self {
            body: 16 << 20,
            error: 256 << 10,
            event: 4 << 20,
            nested: 200_000,
            in_flight: 32 << 20,
            idle: Duration::from_secs(30),
            total: Duration::from_secs(90),
            watch: Duration::from_secs(360),
        }
    }
}

/// Why a response was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ExceededLimit {
    #[error("it has more than {0} bytes")]
    Body(usize),
    #[error("an event has more than {0} bytes")]
    Event(usize),
    #[error("it nests more than {0} objects and lists")]
    Nested(usize),
    #[error("all responses in progress exceed {0} bytes")]
    InFlight(usize),
    #[error("it took longer than {} s", .0.as_secs_f32())]
    Total(Duration),
    #[error("no data arrived for {} s", .0.as_secs_f32())]
    Idle(Duration),
    #[error("the watch took longer than {} s", .0.as_secs_f32())]
    Watch(Duration),
    #[error(transparent)]
    Stored(ExceededBound),
}

impl ExceededLimit {
    /// Returns whether a server that is only slow or unreachable would not cause this.
    fn is_hostile(self) -> bool {
        !matches!(self, Self::Idle(_) | Self::Watch(_))
    }
}

/// A response that was cut off.
#[derive(Debug, Error)]
#[error(
    "failed to read the API server's response to {request_line}: {exceeded}; check that the kubeconfig leads to a Kubernetes API server"
)]
pub struct CutOffError {
    request_line: String,
    exceeded: ExceededLimit,
}

impl CutOffError {
    /// All watches together contain more data than the process keeps for one server.
    pub fn stored(bound: ExceededBound) -> Self {
        Self {
            request_line: "all watches".to_owned(),
            exceeded: ExceededLimit::Stored(bound),
        }
    }
}

/// Callback for each response that exceeds a limit.
pub type CutOffCallback = Arc<dyn Fn(&CutOffError) + Send + Sync>;

/// State that all requests to one server share.
#[derive(Clone)]
pub(super) struct LimitLayer {
    limits: ResponseLimits,
    in_flight: Arc<AtomicUsize>,
    on_cut_off: CutOffCallback,
}

impl LimitLayer {
    pub(super) fn new(limits: ResponseLimits, on_cut_off: CutOffCallback) -> Self {
        Self {
            limits,
            in_flight: Arc::default(),
            on_cut_off,
        }
    }
}

impl<S> Layer<S> for LimitLayer {
    type Service = LimitService<S>;

    fn layer(&self, inner: S) -> LimitService<S> {
        LimitService {
            inner,
            layer: self.clone(),
        }
    }
}

#[derive(Clone)]
pub(super) struct LimitService<S> {
    inner: S,
    layer: LimitLayer,
}

impl<S, A, B> Service<Request<A>> for LimitService<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<LimitedBody<B>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let LimitLayer {
            limits,
            in_flight,
            on_cut_off,
        } = self.layer.clone();
        let request_line = format!("{} {}", request.method(), request.uri().path());
        let is_watch = crate::access::watch_requests::is_watch(request.uri());
        let response_future = self.inner.call(request);
        let started = Instant::now();
        Box::pin(async move {
            let head = timeout_at(started + limits.total, response_future).await;
            let Ok(head) = head else {
                let exceeded = ExceededLimit::Idle(limits.total);
                return Err(CutOffError {
                    request_line,
                    exceeded,
                }
                .into());
            };
            let response = head.map_err(Into::into)?;
            let is_success = response.status().is_success();
            let kind = match (is_success, is_watch) {
                (false, _) => ResponseKind::Plain(limits.error),
                (true, false) => ResponseKind::Plain(limits.body),
                (true, true) => ResponseKind::Watch,
            };
            let max_duration = match kind {
                ResponseKind::Plain(_) => limits.total,
                ResponseKind::Watch => limits.watch,
            };
            let meter = ResponseMeter::new(kind, limits);
            Ok(response.map(|inner| LimitedBody {
                inner,
                request_line,
                meter,
                in_flight_bytes: InFlightBytes {
                    in_flight,
                    bytes: 0,
                },
                idle: Box::pin(sleep_until(Instant::now() + limits.idle)),
                end: Box::pin(sleep_until(started + max_duration)),
                is_over: false,
                on_cut_off,
            }))
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum ResponseKind {
    /// A response, with its maximum number of bytes.
    Plain(usize),
    Watch,
}

/// Counts the bytes of a response, or of each event of a watch.
#[derive(Debug)]
struct ResponseMeter {
    kind: ResponseKind,
    limits: ResponseLimits,
    bytes: usize,
    nested: usize,
}

impl ResponseMeter {
    fn new(kind: ResponseKind, limits: ResponseLimits) -> Self {
        Self {
            kind,
            limits,
            bytes: 0,
            nested: 0,
        }
    }

    fn is_watch(&self) -> bool {
        matches!(self.kind, ResponseKind::Watch)
    }

    fn read(&mut self, data: &[u8]) -> Result<(), ExceededLimit> {
        if !self.is_watch() {
            return self.count(data);
        }
        for line in data.split_inclusive(|byte| *byte == b'\n') {
            self.count(line)?;
            if line.ends_with(b"\n") {
                (self.bytes, self.nested) = (0, 0);
            }
        }
        Ok(())
    }

    fn count(&mut self, data: &[u8]) -> Result<(), ExceededLimit> {
        self.bytes = self.bytes.saturating_add(data.len());
        let is_opening = |byte: &&u8| matches!(**byte, b'{' | b'[');
        self.nested += data.iter().filter(is_opening).count();
        match self.kind {
            ResponseKind::Plain(max) if self.bytes > max => Err(ExceededLimit::Body(max)),
            ResponseKind::Watch if self.bytes > self.limits.event => {
                Err(ExceededLimit::Event(self.limits.event))
            }
            _ if self.nested > self.limits.nested => Err(ExceededLimit::Nested(self.limits.nested)),
            _ => Ok(()),
        }
    }

    fn timeout_error(&self) -> ExceededLimit {
        match self.kind {
            ResponseKind::Plain(_) => ExceededLimit::Total(self.limits.total),
            ResponseKind::Watch => ExceededLimit::Watch(self.limits.watch),
        }
    }
}

/// Bytes of one body in the shared total. Dropping it returns them.
#[derive(Debug)]
struct InFlightBytes {
    in_flight: Arc<AtomicUsize>,
    bytes: usize,
}

impl InFlightBytes {
    fn set(&mut self, bytes: usize, max: usize) -> Result<(), ExceededLimit> {
        let previous_total = self.in_flight.fetch_add(bytes, Ordering::Relaxed);
        self.in_flight.fetch_sub(self.bytes, Ordering::Relaxed);
        let others = previous_total.saturating_sub(self.bytes);
        self.bytes = bytes;
        match others.saturating_add(bytes) > max {
            true => Err(ExceededLimit::InFlight(max)),
            false => Ok(()),
        }
    }
}

impl Drop for InFlightBytes {
    fn drop(&mut self) {
        self.in_flight.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A body that returns an error when it exceeds a limit.
pub(super) struct LimitedBody<B> {
    inner: B,
    request_line: String,
    meter: ResponseMeter,
    in_flight_bytes: InFlightBytes,
    idle: Pin<Box<Sleep>>,
    end: Pin<Box<Sleep>>,
    is_over: bool,
    on_cut_off: CutOffCallback,
}

impl<B> LimitedBody<B> {
    fn take(&mut self, data: &[u8]) -> Result<(), ExceededLimit> {
        let limits = self.meter.limits;
        self.idle.as_mut().reset(Instant::now() + limits.idle);
        self.meter.read(data)?;
        self.in_flight_bytes.set(self.meter.bytes, limits.in_flight)
    }

    fn cut_off(&mut self, exceeded: ExceededLimit) -> BoxError {
        self.is_over = true;
        let request_line = std::mem::take(&mut self.request_line);
        let cut_off = CutOffError {
            request_line,
            exceeded,
        };
        if exceeded.is_hostile() {
            (self.on_cut_off)(&cut_off);
        }
        cut_off.into()
    }
}

impl<B> Body for LimitedBody<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if this.is_over {
            return Poll::Ready(None);
        }
        // Check the time first, because a body that is always ready must also end.
        if this.end.as_mut().poll(cx).is_ready() {
            let exceeded = this.meter.timeout_error();
            return Poll::Ready(Some(Err(this.cut_off(exceeded))));
        }
        let polled = Pin::new(&mut this.inner).poll_frame(cx);
        if polled.is_pending() && !this.meter.is_watch() && this.idle.as_mut().poll(cx).is_ready() {
            let exceeded = ExceededLimit::Idle(this.meter.limits.idle);
            return Poll::Ready(Some(Err(this.cut_off(exceeded))));
        }
        let Some(frame) = ready!(polled) else {
            return Poll::Ready(None);
        };
        let frame = frame.map_err(Into::into)?;
        if let Some(data) = frame.data_ref()
            && let Err(exceeded) = this.take(data)
        {
            return Poll::Ready(Some(Err(this.cut_off(exceeded))));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests;
