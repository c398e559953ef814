package org.apache.lucene.search.intervals;

/** Declared so that the server links; the `intervals` query is not available in this jar. */
public abstract class FilteredIntervalsSource extends IntervalsSource {
    protected FilteredIntervalsSource(String name, IntervalsSource source) {
        throw new UnsupportedOperationException("the intervals query is not available");
    }
}
