//! The macro that all fuzz targets share.

#[doc(hidden)]
pub use libfuzzer_sys;

/// A target that ends at the first input that breaks a promise.
#[macro_export]
macro_rules! target {
    ($broken_promise:path) => {
        $crate::libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
            if let Some(broken) = $broken_promise(bytes) {
                panic!("{broken}");
            }
        });
    };
}
