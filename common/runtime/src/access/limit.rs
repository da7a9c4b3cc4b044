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

use crate::bound::Beyond;

/// Limits for the responses of one API server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
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
    pub at_once: usize,
    /// Longest pause within a response other than a watch.
    pub idle: Duration,
    /// Time limit from the request to the end of a response, or to the start of a watch. An API server gives
    /// up after 60 s.
    pub whole: Duration,
    /// Maximum duration of a watch. The client requests 290 s.
    pub watch: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body: 16 << 20,
            error: 256 << 10,
            event: 4 << 20,
            nested: 200_000,
            at_once: 32 << 20,
            idle: Duration::from_secs(30),
            whole: Duration::from_secs(90),
            watch: Duration::from_secs(360),
        }
    }
}

/// Why a response was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Excess {
    #[error("it has more than {0} bytes")]
    Body(usize),
    #[error("an event has more than {0} bytes")]
    Event(usize),
    #[error("it nests more than {0} objects and lists")]
    Nested(usize),
    #[error("all answers on their way have more than {0} bytes")]
    AtOnce(usize),
    #[error("it does not end within {} s", .0.as_secs_f32())]
    Whole(Duration),
    #[error("nothing comes for {} s", .0.as_secs_f32())]
    Idle(Duration),
    #[error("the watch does not end within {} s", .0.as_secs_f32())]
    Watch(Duration),
    #[error(transparent)]
    Kept(Beyond),
}

impl Excess {
    /// Returns whether a server that is only slow or unreachable would not cause this.
    fn is_hostile(self) -> bool {
        !matches!(self, Self::Idle(_) | Self::Watch(_))
    }
}

/// A response that was cut off.
#[derive(Debug, Error)]
#[error(
    "failed to read the API server's answer to {what}: {excess}; check that the kubeconfig leads to a Kubernetes API server"
)]
pub struct CutOff {
    what: String,
    excess: Excess,
}

impl CutOff {
    /// All watches together contain more data than the process keeps for one server.
    pub fn kept(beyond: Beyond) -> Self {
        Self {
            what: "all watches".to_owned(),
            excess: Excess::Kept(beyond),
        }
    }
}

/// Callback for each response that exceeds a limit.
pub type Report = Arc<dyn Fn(&CutOff) + Send + Sync>;

/// State that all requests to one server share.
#[derive(Clone)]
pub(super) struct LimitLayer {
    limits: Limits,
    at_once: Arc<AtomicUsize>,
    report: Report,
}

impl LimitLayer {
    pub(super) fn new(limits: Limits, report: Report) -> Self {
        Self {
            limits,
            at_once: Arc::default(),
            report,
        }
    }
}

impl<S> Layer<S> for LimitLayer {
    type Service = Limit<S>;

    fn layer(&self, inner: S) -> Limit<S> {
        Limit {
            inner,
            layer: self.clone(),
        }
    }
}

#[derive(Clone)]
pub(super) struct Limit<S> {
    inner: S,
    layer: LimitLayer,
}

impl<S, A, B> Service<Request<A>> for Limit<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<Limited<B>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<A>) -> Self::Future {
        let LimitLayer {
            limits,
            at_once,
            report,
        } = self.layer.clone();
        let what = format!("{} {}", request.method(), request.uri().path());
        let watch = crate::access::watch_requests::is_watch(request.uri());
        let answer = self.inner.call(request);
        let begun = Instant::now();
        Box::pin(async move {
            let headed = timeout_at(begun + limits.whole, answer).await;
            let Ok(answered) = headed else {
                let excess = Excess::Idle(limits.whole);
                return Err(CutOff { what, excess }.into());
            };
            let response = answered.map_err(Into::into)?;
            let success = response.status().is_success();
            let kind = match (success, watch) {
                (false, _) => Kind::Answer(limits.error),
                (true, false) => Kind::Answer(limits.body),
                (true, true) => Kind::Watch,
            };
            let last = match kind {
                Kind::Answer(_) => limits.whole,
                Kind::Watch => limits.watch,
            };
            let meter = Meter::new(kind, limits);
            Ok(response.map(|inner| Limited {
                inner,
                what,
                meter,
                held: Held { at_once, bytes: 0 },
                idle: Box::pin(sleep_until(Instant::now() + limits.idle)),
                end: Box::pin(sleep_until(begun + last)),
                over: false,
                report,
            }))
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A response, with its maximum number of bytes.
    Answer(usize),
    Watch,
}

/// Counts the bytes of a response, or of each event of a watch.
#[derive(Debug)]
struct Meter {
    kind: Kind,
    limits: Limits,
    bytes: usize,
    nested: usize,
}

impl Meter {
    fn new(kind: Kind, limits: Limits) -> Self {
        Self {
            kind,
            limits,
            bytes: 0,
            nested: 0,
        }
    }

    fn is_watch(&self) -> bool {
        matches!(self.kind, Kind::Watch)
    }

    fn read(&mut self, data: &[u8]) -> Result<(), Excess> {
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

    fn count(&mut self, data: &[u8]) -> Result<(), Excess> {
        self.bytes = self.bytes.saturating_add(data.len());
        let opens = |byte: &&u8| matches!(**byte, b'{' | b'[');
        self.nested += data.iter().filter(opens).count();
        match self.kind {
            Kind::Answer(most) if self.bytes > most => Err(Excess::Body(most)),
            Kind::Watch if self.bytes > self.limits.event => Err(Excess::Event(self.limits.event)),
            _ if self.nested > self.limits.nested => Err(Excess::Nested(self.limits.nested)),
            _ => Ok(()),
        }
    }

    fn time_over(&self) -> Excess {
        match self.kind {
            Kind::Answer(_) => Excess::Whole(self.limits.whole),
            Kind::Watch => Excess::Watch(self.limits.watch),
        }
    }
}

/// Bytes of one body in the shared total. Dropping it returns them.
#[derive(Debug)]
struct Held {
    at_once: Arc<AtomicUsize>,
    bytes: usize,
}

impl Held {
    fn set(&mut self, bytes: usize, most: usize) -> Result<(), Excess> {
        let before = self.at_once.fetch_add(bytes, Ordering::Relaxed);
        self.at_once.fetch_sub(self.bytes, Ordering::Relaxed);
        let others = before.saturating_sub(self.bytes);
        self.bytes = bytes;
        match others.saturating_add(bytes) > most {
            true => Err(Excess::AtOnce(most)),
            false => Ok(()),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.at_once.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A body that returns an error when it exceeds a limit.
pub(super) struct Limited<B> {
    inner: B,
    what: String,
    meter: Meter,
    held: Held,
    idle: Pin<Box<Sleep>>,
    end: Pin<Box<Sleep>>,
    over: bool,
    report: Report,
}

impl<B> Limited<B> {
    fn check_time(&mut self, cx: &mut Context<'_>) -> Result<(), Excess> {
        if self.end.as_mut().poll(cx).is_ready() {
            return Err(self.meter.time_over());
        }
        Ok(())
    }

    fn check_idle(&mut self, cx: &mut Context<'_>) -> Result<(), Excess> {
        if !self.meter.is_watch() && self.idle.as_mut().poll(cx).is_ready() {
            return Err(Excess::Idle(self.meter.limits.idle));
        }
        Ok(())
    }

    fn take(&mut self, data: &[u8]) -> Result<(), Excess> {
        let limits = self.meter.limits;
        self.idle.as_mut().reset(Instant::now() + limits.idle);
        self.meter.read(data)?;
        self.held.set(self.meter.bytes, limits.at_once)
    }

    fn cut_off(&mut self, excess: Excess) -> BoxError {
        self.over = true;
        let what = std::mem::take(&mut self.what);
        let cut_off = CutOff { what, excess };
        if excess.is_hostile() {
            (self.report)(&cut_off);
        }
        cut_off.into()
    }
}

impl<B> Body for Limited<B>
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
        if this.over {
            return Poll::Ready(None);
        }
        // Check the time first, because a body that is always ready must also end.
        let checked = this.check_time(cx);
        if let Err(excess) = checked {
            return Poll::Ready(Some(Err(this.cut_off(excess))));
        }
        let polled = Pin::new(&mut this.inner).poll_frame(cx);
        if polled.is_pending()
            && let Err(excess) = this.check_idle(cx)
        {
            return Poll::Ready(Some(Err(this.cut_off(excess))));
        }
        let Some(frame) = ready!(polled) else {
            return Poll::Ready(None);
        };
        let frame = frame.map_err(Into::into)?;
        if let Some(data) = frame.data_ref()
            && let Err(excess) = this.take(data)
        {
            return Poll::Ready(Some(Err(this.cut_off(excess))));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.over || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests;
