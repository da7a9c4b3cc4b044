//! Log lines and panics of simulated processes.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Once;

use krypton_runtime::world;
use tracing_subscriber::fmt::MakeWriter;

thread_local! {
    static LINES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// Whether the log lines of this thread's simulations are captured.
    static IS_CAPTURING: Cell<bool> = const { Cell::new(false) };
}

/// Collects the panics of simulated processes instead of printing them.
pub(crate) fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if world::current().is_some() {
                PANICS.with_borrow_mut(|panics| panics.push(panic.to_string()));
            } else {
                default_hook(panic);
            }
        }));
    });
}

/// Captures the log lines of this thread's simulations from now on, at this level and above.
pub fn capture(level: tracing::Level) -> tracing::subscriber::DefaultGuard {
    IS_CAPTURING.set(true);
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .without_time()
        .with_ansi(false)
        .with_writer(CaptureWriter)
        .finish();
    tracing::subscriber::set_default(subscriber)
}

/// Takes the lines since the last call.
pub(crate) fn take_lines() -> Vec<String> {
    if !IS_CAPTURING.get() {
        return Vec::new();
    }
    let bytes = LINES.take();
    let text = String::from_utf8_lossy(&bytes);
    text.lines().map(str::to_owned).collect()
}

/// Takes the panics since the last call.
pub(crate) fn take_panics() -> Vec<String> {
    PANICS.take()
}

#[derive(Clone, Copy, Debug)]
struct CaptureWriter;

impl io::Write for CaptureWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LINES.with_borrow_mut(|lines| lines.extend_from_slice(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for CaptureWriter {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}
